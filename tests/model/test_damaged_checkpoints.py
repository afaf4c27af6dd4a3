"""Checkpoints with something wrong: each is refused by a sentence that names the file and the tensor."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from server.model.checkpoint import has_draft, open_checkpoint
from server.model.config import CheckpointError
from server.model.draft import Draft
from server.model.file_reader import ByteCount, FileReader
from server.model.loader import check_tensors, load_checkpoint, load_model
from server.model.tensor_files import INDEX, read_index, tensor_headers
from tests.support.damaged_headers import damaged
from tests.support.quantized_checkpoints import BASE, OFFICIAL, make_quantized, write_shards

N_DAMAGED = 400
SPARE_NBYTES = 1 << 30
"""Address space beside what the process has already: far below what a header may claim."""
ATTENTION, EXPERT = "layers.0.attn.wq_a", "layers.0.ffn.experts.1.w2"

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A quantized checkpoint in two files, small and without a draft."""
    make_quantized(tmp_path, shards=2, draft=False, num_hidden_layers=2, n_routed_experts=2, compress_ratios=[0, 4, 0])
    return tmp_path


def change(model: Path, edit: Callable[[Tensors], Any]) -> None:
    """Writes the checkpoint again after ``edit`` of its tensors."""
    tensors: Tensors = {}
    for file in sorted(model.glob("*.safetensors")):
        tensors |= load_file(file)
    edit(tensors)
    write_shards(model, tensors, 2)


def shard_of(model: Path, key: str) -> str:
    index = read_index(model)
    assert index is not None
    return index[key]


def refusal(model: Path) -> str:
    """What every way of looking at the checkpoint says of it."""
    said = set()
    for look in (check_tensors, load_model):
        with pytest.raises(CheckpointError) as refused:
            look(model)
        said.add(str(refused.value))
    (words,) = said
    return words


# --- headers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def little_memory() -> Iterator[None]:
    """A header that makes the process take a gigabyte ends it."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (n_pages * resource.getpagesize() + SPARE_NBYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


@pytest.mark.usefixtures("little_memory")
def test_a_damaged_header_is_refused_by_the_name_of_its_file(model: Path) -> None:
    whole = open_checkpoint(model)
    file = whole.files[0]
    image = file.read_bytes()
    refusals = []
    for seed in range(N_DAMAGED):
        file.write_bytes(damaged(image, seed))
        try:
            assert open_checkpoint(model) == whole, f"seed {seed} changes what the header says"
        except CheckpointError as error:
            refusals.append(str(error))
    assert [words for words in refusals if file.name not in words] == []
    assert len(refusals) > 0.9 * N_DAMAGED


def test_a_file_that_is_cut_off_is_named_with_the_first_tensor_that_it_lacks(model: Path) -> None:
    headers = [header for header in tensor_headers(model) if header.file.name.startswith("model-00002")]
    cut = headers[3]
    with cut.file.open("r+b") as file:
        file.truncate(cut.offset + 1)
    words, end = refusal(model), headers[-1].offset + headers[-1].nbytes
    assert f"{cut.file.name} is not a readable safetensors file" in words
    assert f"(cut off in {cut.key}: {cut.offset + 1} bytes of {end})" in words


def test_a_file_that_ends_within_its_header_is_named(model: Path) -> None:
    file = model / shard_of(model, f"{ATTENTION}.weight")
    file.write_bytes(file.read_bytes()[:100])
    assert "it ends within its header" in refusal(model)


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(10))
    shorter = pytest.raises(CheckpointError, match=r"weights has become shorter .* within layer 7")
    with FileReader(file, ByteCount(20, None)) as reader, shorter:
        reader.read_into(memoryview(bytearray(20)), "layer 7")
    with FileReader(file, ByteCount(10, None)) as reader:
        reader.skip_to(9, "a part")
        with pytest.raises(CheckpointError, match="weights has become longer"):
            reader.end()


# --- files and their index --------------------------------------------------------------------------------------------


def test_a_missing_file_is_named_with_what_it_would_hold(model: Path) -> None:
    name = shard_of(model, f"{ATTENTION}.weight")
    (model / name).unlink()
    assert f"{INDEX} names {name}, which is not there (1 of 2 missing); it would hold " in refusal(model)


def test_a_missing_file_is_known_by_the_numbers_of_the_others(model: Path) -> None:
    (model / INDEX).unlink()
    open_checkpoint(model)
    (model / "model-00001-of-00002.safetensors").unlink()
    assert "model-00001-of-00002.safetensors is not there (1 missing by the numbers" in refusal(model)


def test_a_tensor_in_two_files_is_refused(model: Path) -> None:
    key = f"{ATTENTION}.weight"
    other = next(file for file in model.glob("*.safetensors") if file.name != shard_of(model, key))
    save_file(load_file(other) | {key: torch.zeros(1)}, other)
    assert f"{key} is in two files, model-00001-of-00002.safetensors and model-00002" in refusal(model)


def edit_index(model: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    content = json.loads((model / INDEX).read_text(encoding="utf-8"))
    edit(content["weight_map"])
    (model / INDEX).write_text(json.dumps(content), encoding="utf-8")


def test_an_index_that_names_another_file_is_refused(model: Path) -> None:
    key, right = f"{ATTENTION}.weight", shard_of(model, f"{ATTENTION}.weight")
    wrong = next(file.name for file in model.glob("*.safetensors") if file.name != right)
    edit_index(model, lambda index: index.update({key: wrong}))
    assert f"{key} is in {right}, but {INDEX} says in {wrong}" in refusal(model)


def test_a_tensor_that_only_the_index_has_is_named_with_its_file(model: Path) -> None:
    edit_index(model, lambda index: index.update({"layers.9.x": "model-00002-of-00002.safetensors"}))
    assert f"model-00002-of-00002.safetensors: layers.9.x is not in it, although {INDEX} says so" in refusal(model)


def test_a_tensor_that_the_index_lacks_is_named_with_its_file(model: Path) -> None:
    key, name = f"{ATTENTION}.scale", shard_of(model, f"{ATTENTION}.scale")
    edit_index(model, lambda index: index.pop(key))
    assert f"{name}: {key} is in it, but not in {INDEX}" in refusal(model)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "3", "null", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../model-00001-of-00002.safetensors"}}', '{"weight_map": {"a": "/etc/passwd"}}',
        '{"weight_map": {"a": ""}}', '{"weight_map": {"a": "a\\u0000.safetensors"}}', "[" * 100_000, "\udcff",
    ],
)  # fmt: skip
def test_an_index_that_is_none_is_named(model: Path, text: str) -> None:
    (model / INDEX).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert INDEX in refusal(model)


# --- tensors ----------------------------------------------------------------------------------------------------------


def test_missing_and_unknown_tensors_are_named(model: Path) -> None:
    change(model, lambda tensors: tensors.pop(f"{EXPERT}.scale"))
    assert f"missing {EXPERT}.scale" in refusal(model)
    unknown = f"{EXPERT}.scale_2"
    change(model, lambda tensors: tensors.update({unknown: torch.zeros(1)}))
    assert f"missing {EXPERT}.scale; unknown {unknown} (in {shard_of(model, unknown)})" in refusal(model)


def as_dtype(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    """The same bytes by another name."""
    return lambda tensor: tensor.view(dtype)


WRONG: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor], str]] = {
    "I8 for fp8": (f"{ATTENTION}.weight", as_dtype(torch.int8), "stored as I8, config.json asks for F8_E4M3"),
    "fp8 for I8": (f"{EXPERT}.weight", as_dtype(torch.float8_e4m3fn), "stored as F8_E4M3, config.json asks for I8"),
    "U8 for I8": (f"{EXPERT}.weight", as_dtype(torch.uint8), "stored as U8, config.json asks for I8"),
    "another fp8": (f"{ATTENTION}.weight", as_dtype(torch.float8_e5m2), "stored as F8_E5M2"),
    "plain for fp8": (f"{ATTENTION}.weight", lambda t: t.float(), "stored as F32, config.json asks for F8_E4M3"),
    "fp8 for plain": ("embed.weight", lambda t: t.to(torch.float8_e4m3fn), "stored as F8_E4M3, config.json asks for"),
    "I8 for plain": ("norm.weight", lambda t: t.to(torch.int8), "stored as I8, config.json asks for F32 or BF16 or"),
    "scale in fp32": (f"{ATTENTION}.scale", lambda t: t.float(), "stored as F32, config.json asks for F8_E8M0"),
    "scale as bytes": (f"{EXPERT}.scale", as_dtype(torch.uint8), "stored as U8, config.json asks for F8_E8M0"),
    "floats for ids": ("layers.0.ffn.gate.tid2eid", lambda t: t.float(), "stored as F32, config.json asks for I64"),
    "shape": ("norm.weight", lambda t: t[:-1], "has shape [63], config.json asks for [64]"),
    "turned round": (f"{ATTENTION}.weight", lambda t: t.reshape(64, 32), "has shape [64, 32], config.json asks for"),
    "scale of another block": (
        f"{ATTENTION}.scale", lambda t: t.expand(2, 1), "has shape [2, 1], config.json asks for [1, 1]",
    ),
    "scale of fp8 experts": (f"{EXPERT}.scale", lambda t: t[:1, :1], "has shape [1, 1], config.json asks for [64, 2]"),
}  # fmt: skip


@pytest.mark.parametrize(("key", "edit", "words"), WRONG.values(), ids=WRONG)
def test_a_wrong_dtype_or_shape_is_named_with_its_file(
    model: Path, key: str, edit: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    change(model, lambda tensors: tensors.update({key: edit(tensors[key]).contiguous()}))
    found = refusal(model)
    assert f"{shard_of(model, key)}: {key} " in found
    assert words in found


def test_quantized_tensors_beside_a_plain_config_are_explained(model: Path) -> None:
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"quantization_config": None, "expert_dtype": None}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert "config.json does not say that these weights are quantized" in refusal(model)


NOT_FINITE: dict[str, tuple[str, float, str]] = {
    "fp8 code": (f"{ATTENTION}.weight", float("nan"), f"{ATTENTION}.weight"),
    "fp8 scale": (f"{ATTENTION}.scale", float("nan"), f"{ATTENTION}.weight"),
    "fp4 scale": (f"{EXPERT}.scale", float("nan"), f"{EXPERT}.weight"),
    "plain": ("head.weight", float("inf"), "head.weight"),
}


@pytest.mark.parametrize(("key", "value", "named"), NOT_FINITE.values(), ids=NOT_FINITE)
def test_a_number_that_is_not_finite_is_named(model: Path, key: str, value: float, named: str) -> None:
    def edit(tensors: Tensors) -> None:
        tensors[key].flatten()[-1:].copy_(torch.tensor(value))

    change(model, edit)
    with pytest.raises(CheckpointError, match=rf"{named} holds a number that is not finite"):
        load_model(model)


# --- what the tensors tell --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [OFFICIAL, BASE], ids=["fp4", "fp8"])
def test_where_the_config_does_not_say_how_experts_are_stored_the_tensors_do(
    tmp_path: Path, stored: dict[str, Any]
) -> None:
    made = make_quantized(tmp_path, shards=1, draft=False, **stored)
    raw = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    del raw["expert_dtype"]
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    weight = load_model(tmp_path).get_parameter(f"{EXPERT}.weight")
    assert torch.equal(weight, made.numbers[f"{EXPERT}.weight"])


DSPARK: dict[str, Any] = {
    "num_hidden_layers": 2,
    "n_routed_experts": 2,
    "compress_ratios": [0, 4, 0, 0, 0],
    "dspark_block_size": 5,
    "dspark_target_layer_ids": [0, 1],
    "dspark_markov_rank": 16,
}


def test_a_release_with_dspark_loads_without_a_draft_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_quantized(tmp_path, shards=2, **DSPARK)
    assert "mtp.2.markov_head.markov_w1.weight" in made.stored
    assert not has_draft(tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = load_checkpoint(tmp_path)
    assert (loaded.draft, loaded.network.drafts) == (Draft.DSPARK, False)
    assert "its draft (dspark) is not loaded" in caplog.text
    with pytest.raises(CheckpointError, match=r"mtp\.0\.main_proj\.weight shows a DSpark draft"):
        check_tensors(tmp_path, draft=True)
    change(tmp_path, lambda tensors: tensors.pop("mtp.1.attn.wkv.scale"))
    assert "missing mtp.1.attn.wkv.scale" in refusal(tmp_path)


def test_a_draft_layer_that_is_not_loaded_must_be_whole_all_the_same(tmp_path: Path) -> None:
    make_quantized(tmp_path, shards=2)
    assert has_draft(tmp_path)
    n_tensors = check_tensors(tmp_path)
    assert check_tensors(tmp_path, draft=True) > n_tensors
    change(tmp_path, lambda tensors: tensors.pop("mtp.0.attn.wkv.scale"))
    assert "missing mtp.0.attn.wkv.scale" in refusal(tmp_path)
