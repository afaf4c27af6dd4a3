"""A checkpoint whose weights stay in its files computes the bits of one that is loaded, with less memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from server.cache.layout import Placement
from server.kernels.choice import Kernels, choose_kernels
from server.model.batch import Segment
from server.model.config import CheckpointError
from server.model.interface import LoadedModel
from server.model.loader import load_checkpoint
from server.model.packed import map_checkpoint
from server.model.stored import WeightsUnreadable
from tests.support.checkpoints import BUNDLED
from tests.support.quantized_checkpoints import BASE, OFFICIAL, make_quantized
from tests.support.runners import make_runner

ALL = 1 << 30
DTYPES = [torch.float32, torch.bfloat16]
PLACE = Placement(2, (3, 1))
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "official": OFFICIAL,
    "base": BASE,
    "odd sizes": OFFICIAL
    | {"hidden_size": 146, "moe_intermediate_size": 82, "q_lora_rank": 75, "o_lora_rank": 27, "vocab_size": 131},
    "many experts": OFFICIAL | {"n_routed_experts": 24, "num_experts_per_tok": 3},
}


@pytest.fixture(scope="module", params=[*CHECKPOINTS, "bundled"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "bundled":
        return BUNDLED
    return make_quantized(tmp_path_factory.mktemp("made"), **CHECKPOINTS[request.param]).path


@pytest.fixture(params=["cpu", "python"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return chosen(request.param)


def chosen(which: str) -> Kernels:
    """For ``python`` or ``cpu``; skips the test where there are no kernels."""
    kernels = choose_kernels("auto" if which == "cpu" else which, "cpu")
    if kernels.name != which:
        pytest.skip(kernels.reason)
    return kernels


def results(model: LoadedModel, threads: int = 1) -> dict[str, torch.Tensor]:
    """Of a prompt in two chunks, a decode step, and a draft step."""
    runner = make_runner(model, threads=threads)
    ids = torch.randint(model.config.vocab_size, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    try:
        first = runner.forward([Segment(ids[:20], 0, PLACE)], every_row=True)
        second = runner.forward([Segment(ids[20:-1], 20, PLACE)], with_hidden=True)
        third = runner.forward([Segment(ids[-1:], 149, PLACE)])
        draft = runner.draft([Segment(ids[1:20], 0, PLACE)], first.streams[:19])
    finally:
        runner.set_threads(1)
    return {
        "first logits": first.logits,
        "second logits": second.logits,
        "its hidden rows": runner.logits(second.hidden[-3:]) if second.hidden is not None else second.logits,
        "third logits": third.logits,
        "third streams": third.streams,
        "draft logits": draft.logits,
        "draft streams": draft.streams,
    }


def smallest_budget(path: Path, kernels: Kernels, dtype: torch.dtype) -> int:
    with pytest.raises(CheckpointError, match=r"--weights-memory 1: this checkpoint needs at least (\d+)") as refused:
        kernels.take(map_checkpoint(path, 1, dtype=dtype, draft=True).network)
    return int(str(refused.value).split("at least ")[1].split()[0])


def test_packed_is_dequantized_bit_for_bit(path: Path) -> None:
    check_bits(path, "cpu", torch.float32)


def test_packed_is_dequantized_in_python_too(tmp_path: Path) -> None:
    check_bits(make_quantized(tmp_path / "made", **CHECKPOINTS["many experts"]).path, "python", torch.float32)


@pytest.mark.full
@pytest.mark.parametrize(("which", "dtype"), [("cpu", torch.bfloat16), *(("python", each) for each in DTYPES)])
def test_every_way_is_dequantized_bit_for_bit(path: Path, which: str, dtype: torch.dtype) -> None:
    check_bits(path, which, dtype)


def check_bits(path: Path, which: str, dtype: torch.dtype) -> None:
    kernels = chosen(which)
    loaded = load_checkpoint(path, dtype=dtype, draft=True)
    wanted = results(kernels.take(loaded.network))
    smallest = smallest_budget(path, kernels, dtype)
    for budget, threads in ((ALL, 1), (smallest, 2)):
        mapped = map_checkpoint(path, budget, dtype=dtype, draft=True)
        assert (mapped.fingerprint, mapped.draft) == (loaded.fingerprint, loaded.draft)
        model = kernels.take(mapped.network)
        for name, got in results(model, threads).items():
            assert torch.equal(got, wanted[name]), (name, budget, threads)
        state = model.weights_state()
        assert state.mode == "packed"
        assert state.loaded_nbytes + state.resident_nbytes <= budget == state.budget_nbytes
        assert state.misses > 0
        assert state.read_nbytes > 0


def test_large_weights_are_not_loaded(path: Path) -> None:
    network = map_checkpoint(path, ALL).network
    assert network.stored is not None
    held = sum(parameter.nbytes for parameter in network.parameters())
    assert held == network.stored.loaded_nbytes
    whole = sum(parameter.nbytes for parameter in load_checkpoint(path).network.parameters())
    assert held < 0.2 * whole


def test_loaded_weights_say_so(kernels: Kernels) -> None:
    state = kernels.take(load_checkpoint(BUNDLED).network).weights_state()
    assert (state.mode, state.budget_nbytes, state.misses) == ("dequantized", 0, 0)


def test_file_that_is_cut_off_is_named(tmp_path: Path, kernels: Kernels) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(BUNDLED, copy)
    runner = make_runner(kernels.take(map_checkpoint(copy, ALL, draft=True).network))
    runner.forward([Segment([5, 6], 0, PLACE)])
    (file,) = copy.glob("*.safetensors")
    os.truncate(file, 4096)
    for _ in range(2):
        with pytest.raises(WeightsUnreadable, match=rf"{file}.*\.weight cannot be read any more|shorter: .*weight"):
            runner.forward([Segment([5, 6], 0, PLACE)])


def test_file_that_is_short_at_the_start_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(BUNDLED, copy)
    (file,) = copy.glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=str(file)):
        map_checkpoint(copy, ALL)
