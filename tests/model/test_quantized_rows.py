"""The model over quantized rows: near the model over its own, the same bits however it is cut, and never silent."""

from __future__ import annotations

import pytest
import torch

from server.cache.layout import Placement
from server.cache.specs import HANDOFF
from server.engine.runner import ModelRunner
from server.model.batch import Segment
from server.model.config import CSA, load_config
from server.model.interface import LoadedModel
from server.model.loader import load_model
from server.model.numerics import OFFICIAL
from server.model.pools import Pools
from server.model.state import state_components
from tests.support.checkpoints import BUNDLED
from tests.support.models import load
from tests.support.runners import make_runner, prefill, prompt

N = 285
"""Over a page; one token of a CSA group is open, and 29 of an HCA window."""
PLACE, ELSEWHERE = Placement(1, (1, 2)), Placement(5, (9, 4))
ROWS = [("fp8", "auto"), ("fp8", "fp8"), ("fp8", "model"), ("model", "mxfp4"), ("model", "fp8")]


@pytest.fixture(scope="module")
def models() -> dict[torch.dtype, LoadedModel]:
    return {dtype: load(BUNDLED, "python", dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}


@pytest.fixture(scope="module")
def model(models: dict[torch.dtype, LoadedModel]) -> LoadedModel:
    return models[torch.float32]


def live_bytes(runner: ModelRunner, n: int, place: Placement) -> dict[str, bytes]:
    runs = runner.arena.layout.live_runs(n, place)
    return {name: runner.arena.read(part) for name, part in runs.items() if name != HANDOFF}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_dtype", "index_dtype"), ROWS)
def test_chunks_ids_and_rings_change_no_bit(
    models: dict[torch.dtype, LoadedModel], dtype: torch.dtype, kv_dtype: str, index_dtype: str
) -> None:
    model = models[dtype]
    ids = prompt(N, model)
    whole, parts = (
        make_runner(model, spec_tokens=spec_tokens, kv_dtype=kv_dtype, index_dtype=index_dtype)
        for spec_tokens in (0, 3)
    )
    expected, found = prefill(whole, ids, PLACE, 1024), prefill(parts, ids, ELSEWHERE, 50)
    assert expected.isfinite().all()
    assert torch.equal(found, expected)
    assert live_bytes(parts, N, ELSEWHERE) == live_bytes(whole, N, PLACE)


def test_single_tokens_make_the_bits_of_a_chunk(model: LoadedModel) -> None:
    """What decoding writes and reads is what prefilling would have."""
    ids = prompt(140, model)
    whole, parts = make_runner(model, kv_dtype="fp8"), make_runner(model, kv_dtype="fp8")
    expected = prefill(whole, ids, PLACE, 256)
    found = torch.cat([prefill(parts, ids[:60], PLACE, 60), _one_by_one(parts, ids, 60)])
    assert torch.equal(found, expected)
    assert live_bytes(parts, 140, PLACE) == live_bytes(whole, 140, PLACE)


def _one_by_one(runner: ModelRunner, ids: list[int], start: int) -> torch.Tensor:
    return torch.cat([runner.forward([Segment(ids[i : i + 1], i, PLACE)]).logits for i in range(start, len(ids))])


def test_requests_beside_each_other_get_the_bits_of_one(model: LoadedModel) -> None:
    lengths = [1, 3, 4, 63, 65, 129, 257]
    prompts = [prompt(n, model, seed=n) for n in lengths]
    where = [Placement(i + 1, (2 * i + 1, 2 * i + 2)) for i in range(len(lengths))]
    runner = make_runner(model, kv_dtype="fp8")
    for _ in range(2):  # once more with a token more
        logits = runner.forward([Segment(ids, 0, place) for ids, place in zip(prompts, where, strict=True)]).logits
        for ids, row in zip(prompts, logits, strict=True):
            alone = prefill(make_runner(model, kv_dtype="fp8"), ids, PLACE, 512)[-1]
            assert torch.equal(row, alone), f"{len(ids)} tokens"
            ids.append(int(row.argmax()))


def test_in_bfloat16_quantized_rows_are_those_of_official_numerics() -> None:
    """Which rounds rows in the same way and keeps them in bfloat16: so nothing differs but their bytes."""
    model = load_model(BUNDLED, dtype=torch.bfloat16, numerics=OFFICIAL, draft=True)
    wide, quantized = make_runner(model), make_runner(model, kv_dtype="fp8", index_dtype="mxfp4")
    ids = prompt(N, model)
    assert torch.equal(prefill(quantized, ids, ELSEWHERE, 64), prefill(wide, ids, PLACE, 64))
    for position in range(N, N + 5):
        expected, found = (
            runner.forward([Segment([7], position, place)], every_row=True)
            for runner, place in ((wide, PLACE), (quantized, ELSEWHERE))
        )
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.streams, expected.streams)
    pools = [Pools(runner.arena, model.config, model.dtype) for runner in (wide, quantized)]
    entries = torch.arange(N // CSA)
    for layer in model.config.layers_of(CSA):
        for name in ("c4_kv", "c4_index"):
            rows = [
                pool.page[name].gather(layer, torch.tensor(place.pages)[entries // 64], entries % 64)
                for pool, place in zip(pools, (PLACE, ELSEWHERE), strict=True)
            ]
            assert torch.equal(*rows), f"{name} of layer {layer}"


@pytest.mark.parametrize(("kv_dtype", "index_dtype"), ROWS)
def test_quantized_rows_are_near_the_models_own(model: LoadedModel, kv_dtype: str, index_dtype: str) -> None:
    ids = prompt(N, model)
    own = prefill(make_runner(model), ids, PLACE, 512)
    quantized = prefill(make_runner(model, kv_dtype=kv_dtype, index_dtype=index_dtype), ids, PLACE, 512)
    assert not torch.equal(quantized, own)
    distance = (quantized - own).abs().amax(-1) / own.abs().amax(-1)
    assert distance.median() < 0.1


@pytest.mark.parametrize("name", ["swa", "c4_kv", "c128_kv"])
def test_a_row_that_was_never_written_shows(model: LoadedModel, name: str) -> None:
    """Poisoned bytes decode to NaN: through the codes, the rope channels and the scales alike."""
    ids = prompt(N, model)
    runner = make_runner(model, kv_dtype="fp8")
    prefill(runner, ids, PLACE, 512)
    before = runner.forward([Segment([7], N, PLACE)]).logits
    assert before.isfinite().all()
    for run in runner.arena.layout.live_runs(N, PLACE)[name]:
        runner.arena.write(run, b"\xff" * run.nbytes)
    assert not runner.forward([Segment([7], N, PLACE)]).logits.isfinite().any()


def test_every_row_but_the_states_is_stored_quantized() -> None:
    specs = state_components(load_config(BUNDLED), "float32", draft=True, kv_dtype="fp8")
    assert {spec.name: spec.dtype for spec in specs} == {
        "c4_kv": "fp8_kv",
        "c4_index": "mxfp4_index",
        "c128_kv": "fp8_kv",
        "swa": "fp8_kv",
        "draft_swa": "fp8_kv",
        "c4_state_a": "float32",
        "c4_state_b": "float32",
        "c4_index_state_a": "float32",
        "c4_index_state_b": "float32",
        "c128_state": "float32",
        "handoff": "uint8",
    }
