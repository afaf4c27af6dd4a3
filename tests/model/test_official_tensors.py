"""The table of official tensors, against the totals of the published checkpoints and against the network itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server.model.config import load_config
from server.model.loader import official_key
from server.model.network import DeepseekV4
from server.model.official_tensors import official_tensors
from server.node.options import BUNDLED_MODEL

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
