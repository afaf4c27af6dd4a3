"""The table of official tensors, against the totals of the published checkpoints and against the network itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from server.model.config import CheckpointError, DSpark, config_from, load_config
from server.model.loader import official_key
from server.model.network import DeepseekV4
from server.model.official_tensors import official_tensors
from server.node.options import BUNDLED_MODEL
from tests.support.checkpoints import VOCAB_SIZE

DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 3,
    "dspark_target_layer_ids": [1, 3],
    "dspark_markov_rank": 16,
    "compress_ratios": [0, 4, 128, 4, 0, 0, 0],
}
CONFIGS = Path(__file__).parents[3] / "shared" / "data" / "dsv4"


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the official configs are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "n_tensors", "nbytes"), [("flash", 69_187, 159_609_485_896), ("pro", 145_116, 864_704_792_696)]
)
def test_the_totals_are_those_of_the_published_checkpoints(name: str, n_tensors: int, nbytes: int) -> None:
    tensors = official_tensors(load_config(CONFIGS / name))
    assert (len(tensors), sum(spec.nbytes for spec in tensors.values())) == (n_tensors, nbytes)


def test_the_table_names_every_parameter_of_the_network_in_its_shape() -> None:
    config = load_config(BUNDLED_MODEL)
    with torch.device("meta"):
        network = DeepseekV4(config, torch.float32, 16, draft=True)
    shapes = {official_key(name): tuple(parameter.shape) for name, parameter in network.named_parameters()}
    assert {key: spec.shape for key, spec in official_tensors(config).items()} == shapes


@pytest.mark.skipif(not CONFIGS.is_dir(), reason="the official configs are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "rank", "n_tensors", "nbytes"),
    [("flash", 256, 72_317, 166_878_536_440), ("pro", 512, 149_782, 892_727_580_904)],
)
def test_the_totals_are_those_of_the_releases_with_dspark(name: str, rank: int, n_tensors: int, nbytes: int) -> None:
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    n = raw["num_hidden_layers"]
    changes = DSPARK | {"dspark_target_layer_ids": [n - 3, n - 2, n - 1], "dspark_markov_rank": rank}
    changes["compress_ratios"] = [*raw["compress_ratios"][:n], 0, 0, 0]
    tensors = official_tensors(config_from(raw | changes, "config.json"))
    assert (len(tensors), sum(spec.nbytes for spec in tensors.values())) == (n_tensors, nbytes)


def test_a_dspark_draft_has_its_input_in_the_first_stage_and_its_output_in_the_last() -> None:
    raw = json.loads((BUNDLED_MODEL / "config.json").read_text()) | DSPARK
    config = config_from(raw, "config.json")
    assert config.dspark == DSpark(3, (1, 3), 5, 16, 3)
    shapes = {key: spec.shape for key, spec in official_tensors(config).items() if key.startswith("mtp.")}
    block = {key.removeprefix("mtp.1.") for key in shapes if key.startswith("mtp.1.")}
    own = {key: shape for key, shape in shapes.items() if key.split(".", 2)[2] not in block}
    assert own == {
        "mtp.0.main_proj.weight": (128, 256),
        "mtp.0.main_norm.weight": (128,),
        "mtp.2.norm.weight": (128,),
        "mtp.2.hc_head_fn": (2, 256),
        "mtp.2.hc_head_base": (2,),
        "mtp.2.hc_head_scale": (1,),
        "mtp.2.markov_head.markov_w1.weight": (config.vocab_size, 16),
        "mtp.2.markov_head.markov_w2.weight": (config.vocab_size, 16),
        "mtp.2.confidence_head.proj.weight": (1, 144),
    }
    assert len(shapes) == 3 * len(block) + len(own)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("compress_ratios", [0, 4, 128, 4], r"ends with \[\] behind the layers"),
        ("compress_ratios", [0, 4, 128, 4, 0, 4], r"ends with \[0, 4\] behind the layers"),
        ("dspark_target_layer_ids", [2, 4], r"dspark_target_layer_ids is \[2, 4\]; it must name layers below"),
        ("dspark_target_layer_ids", [], r"dspark_target_layer_ids is \[\]"),
        ("dspark_target_layer_ids", [3, 1], "allowed is a list of layer numbers, ascending"),
        ("dspark_noise_token_id", VOCAB_SIZE, f"dspark_noise_token_id is {VOCAB_SIZE}; it must be below vocab_size"),
    ],
)
def test_a_dspark_draft_that_cannot_be_is_refused_by_its_field(field: str, value: object, words: str) -> None:
    raw = json.loads((BUNDLED_MODEL / "config.json").read_text()) | DSPARK
    with pytest.raises(CheckpointError, match=words):
        config_from(raw | {field: value}, "config.json")
