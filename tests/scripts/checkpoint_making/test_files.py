"""Files that are written piece by piece are the files that the library writes, and nothing is left out of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint_making.files import INDEX, FilesError, ShardedFiles, shards_of
from safetensors.torch import load_file, save_file

from server.model.official_tensors import TensorSpec

TENSORS = {
    "b.scale": torch.tensor([[1.0], [2.0], [4.0]]).to(torch.float8_e8m0fnu),
    "b.weight": torch.arange(15.0).view(3, 5).to(torch.float8_e4m3fn),
    "a": torch.tensor([1.5, -2.0, 3.0]).bfloat16(),
    "c": torch.tensor([[7.0]]),
    "d": torch.arange(4, dtype=torch.int8).view(2, 2),
    "e": torch.tensor([[1, 2, 3]]),
}
WORDS = {
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.int64: "I64",
}
TABLE = {key: TensorSpec(tuple(tensor.shape), WORDS[tensor.dtype]) for key, tensor in TENSORS.items()}


def write(folder: Path, shard_nbytes: int) -> ShardedFiles:
    folder.mkdir()
    files = ShardedFiles(folder, TABLE, shard_nbytes)
    for key, tensor in TENSORS.items():
        first, rest = tensor[:1], tensor[1:]
        n = files.write(key, 0, first)
        if len(rest):
            files.write(key, n, rest)
    return files


def test_one_file_is_byte_for_byte_what_the_library_writes(tmp_path: Path) -> None:
    write(tmp_path / "own", 1000).finish()
    save_file(TENSORS, tmp_path / "library.safetensors", metadata={"format": "pt"})
    own = (tmp_path / "own" / "model.safetensors").read_bytes()
    assert own == (tmp_path / "library.safetensors").read_bytes()
    assert not (tmp_path / "own" / INDEX).exists()


def test_several_files_have_an_index_that_names_each_tensor_once(tmp_path: Path) -> None:
    files = write(tmp_path / "own", 16)
    files.finish()
    index = json.loads((tmp_path / "own" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(spec.nbytes for spec in TABLE.values())
    assert index["weight_map"].keys() == TENSORS.keys()
    paths = sorted((tmp_path / "own").glob("*.safetensors"))
    assert len(paths) == files.n_files > 2
    for path in paths:
        for key, tensor in load_file(path).items():
            assert index["weight_map"][key] == path.name
            assert torch.equal(tensor.view(torch.uint8), TENSORS[key].view(torch.uint8))


def test_shards_are_full_and_not_larger_than_asked_for() -> None:
    table = {str(i): TensorSpec((n,), "I8") for i, n in enumerate((4, 4, 9, 1, 3, 3))}
    assert list(shards_of(table, 8)) == [["0", "1"], ["2"], ["3", "4", "5"]]


def test_a_tensor_that_was_not_written_in_full_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    files = ShardedFiles(tmp_path / "own", TABLE, 1000)
    for key, tensor in TENSORS.items():
        files.write(key, 0, tensor[:2])
    with pytest.raises(RuntimeError, match=r"3 tensors were not written in full, such as b\.scale"):
        files.finish()


def test_a_thousand_shards_are_enough(tmp_path: Path) -> None:
    table = {str(i): TensorSpec((1,), "I8") for i in range(1001)}
    with pytest.raises(FilesError, match="1001 shards are more than 1000: give a larger --shard-size"):
        ShardedFiles(tmp_path, table, 1)
