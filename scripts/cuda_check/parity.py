"""The same network on the GPU and on the CPU: logits within a tolerance, the same greedy tokens, the same row bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from evaluation.questions import bundled_questions

from cuda_check.lines import Line
from cuda_check.models import SMALL, config_of, random_model, runner_of
from server.cache.device import to_host
from server.cache.layout import Placement
from server.engine.runner import ModelRunner
from server.engine.tokenizer import Tokenizer
from server.model.batch import Segment
from server.model.loader import load_model
from server.model.network import DeepseekV4
from server.node.options import BUNDLED_MODEL

N_PROMPTS, N_STEPS, CHUNK_TOKENS = 8, 24, 256
FP32_SHARE = 1e-3
"""By what share of a logit fp32 may differ, in the root mean square: sums are added in another order."""
NEAR_TIE = 6.0
"""A token may be another one where the two best logits are no further apart than this many allowed differences."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Answers:
    """Greedy tokens ``[steps][prompts]`` and the logits ``[steps, prompts, V]`` that they were chosen from."""

    tokens: list[list[int]]
    logits: torch.Tensor


def answers(runner: ModelRunner, prompts: Sequence[Sequence[int]], follow: Answers | None = None) -> Answers:
    """Prefill in chunks, then decode in one batch. With ``follow`` its tokens are taken instead of the own ones."""
    places, steps, tokens = _places(runner, prompts), [], []
    longest = max(map(len, prompts))
    last: list[torch.Tensor | None] = [None] * len(prompts)
    for start in range(0, longest, CHUNK_TOKENS):
        parts = {i: ids[start : start + CHUNK_TOKENS] for i, ids in enumerate(prompts) if len(ids) > start}
        output = runner.forward([Segment(part, start, places[i]) for i, part in parts.items()])
        for row, i in enumerate(parts):
            last[i] = to_host(output.logits[row].float())
    logits = torch.stack([row for row in last if row is not None])
    for step in range(N_STEPS):
        steps.append(logits)
        tokens.append(logits.argmax(-1).tolist() if follow is None else follow.tokens[step])
        segments = [
            Segment([token], len(ids) + step, place)
            for token, ids, place in zip(tokens[-1], prompts, places, strict=True)
        ]
        logits = to_host(runner.forward(segments).logits.float())
    return Answers(tokens, torch.stack(steps))


def _places(runner: ModelRunner, prompts: Sequence[Sequence[int]]) -> list[Placement]:
    places, page = [], 1
    for slot, ids in enumerate(prompts, 1):
        n_pages = -(-(len(ids) + N_STEPS) // runner.arena.layout.page_size)
        places.append(Placement(slot, tuple(range(page, page + n_pages))))
        page += n_pages
    return places


def compare(what: str, cpu: Answers, gpu: Answers, allowed: float) -> Iterator[Line]:
    """Two lines: by how much logits differ, and whether the tokens are the same where they are not a matter of that."""
    difference = _rms(cpu.logits - gpu.logits)
    yield Line(f"{what}: logits", f"differ by {difference:.2g}, allowed {allowed:.2g} (rms)", difference <= allowed)
    best = cpu.logits.topk(2, dim=-1).values
    is_decided = best[..., 0] - best[..., 1] > NEAR_TIE * allowed
    same = cpu.logits.argmax(-1) == gpu.logits.argmax(-1)
    n_wrong = int((is_decided & ~same).sum())
    found = f"{int(same.sum())} of {same.numel()} the same, {n_wrong} of the others were no near-tie"
    yield Line(f"{what}: greedy tokens", found, bool(same[is_decided].all()))


def _rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def check(device: torch.device) -> Iterator[Line]:
    tokenizer = Tokenizer.load(BUNDLED_MODEL)
    prompts = [tokenizer.encode(text) for _, text in bundled_questions()[:N_PROMPTS]]
    bundled = {dtype: load_model(BUNDLED_MODEL, dtype=dtype, deterministic=False) for dtype in _DTYPES}
    yield from _formats("bundled", bundled, prompts, device)
    config = config_of(SMALL)
    made = random_model(config, torch.float32, CPU)
    rounded = random_model(config, torch.bfloat16, CPU)
    rounded.load_state_dict(made.state_dict())  # its copies round
    yield from _formats("16 experts", {torch.float32: made, torch.bfloat16: rounded}, prompts, device)
    yield from _row_bytes(device)


_DTYPES = (torch.float32, torch.bfloat16)


def _formats(
    name: str, models: dict[torch.dtype, DeepseekV4], prompts: Sequence[Sequence[int]], device: torch.device
) -> Iterator[Line]:
    """fp32, and the coarser formats. These may differ by as much as they change the results on the CPU itself."""
    there = {dtype: copy.deepcopy(model).to(device) for dtype, model in models.items()}
    fp32, bf16 = _DTYPES
    base = answers(runner_of(models[fp32], CPU), prompts)
    allowed = FP32_SHARE * _rms(base.logits)
    yield from compare(f"{name}, fp32", base, answers(runner_of(there[fp32], device), prompts, base), allowed)
    for what, dtype, kv_dtype in (("fp8 rows", fp32, "fp8"), ("bf16", bf16, "model"), ("bf16, fp8 rows", bf16, "fp8")):
        cpu = answers(runner_of(models[dtype], CPU, kv_dtype=kv_dtype), prompts, base)
        noise = _rms(cpu.logits - base.logits)
        gpu = answers(runner_of(there[dtype], device, kv_dtype=kv_dtype), prompts, base)
        yield from compare(f"{name}, {what}", cpu, gpu, noise)


def _row_bytes(device: torch.device) -> Iterator[Line]:
    """The same values encoded on both, and the same bytes decoded."""
    from server.model.row_codecs import row_codec

    config = config_of(SMALL)
    runner = runner_of(random_model(config, torch.float32, CPU), CPU, kv_dtype="fp8")
    values = torch.randn(4096, config.head_dim, generator=torch.Generator().manual_seed(1))
    values *= torch.logspace(-6, 4, 4096)[:, None]
    for name, width in (("swa", config.head_dim), ("c4_index", config.index_head_dim)):
        codec = row_codec(runner.arena.layout.component(name), config, torch.float32)
        here, there = codec.encode(values[:, :width]), codec.encode(values[:, :width].to(device))
        equal = torch.equal(here, there.cpu()) and torch.equal(codec.decode(here), codec.decode(there).cpu())
        yield Line(f"bytes of {len(here)} {name} rows", "the same" if equal else "they differ", equal)
