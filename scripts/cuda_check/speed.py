"""Prefill and decode at the layer shapes of DeepSeek-V4-Flash, with random weights, in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from cuda_check.lines import Line
from cuda_check.models import FLASH, FLASH_LAYERS, SMALL, config_of, nbytes_of, on_meta, random_model, runner_of
from server.cache.device import Mark
from server.cache.layout import Placement
from server.engine.runner import ModelRunner
from server.engine.sampler import read_best
from server.model.batch import Segment

CONTEXT, CHUNK_TOKENS, PROMPT_TOKENS = 4096, 2048, 8192
BATCHES = (1, 8, 32)
N_STEPS = 16
WEIGHTS_SHARE = 0.65
"""Of the free memory: the rest is for pools, activations, and a layer's experts while they are put side by side."""


def check(device: torch.device) -> Iterator[Line]:
    n_layers, raw = _fitting_layers(device)
    if not n_layers:
        yield Line("Flash's layers", "not one of them fits into the free memory", ok=False)
        return
    config = config_of(raw, n_layers)
    began = time.perf_counter()
    model = random_model(config, torch.bfloat16, device)
    Mark(device).wait()
    kinds = ", ".join({0: "window", 4: "CSA", 128: "HCA"}[ratio] for ratio in config.compress_ratios)
    found = f"{nbytes_of(model) / 2**30:.1f} GiB made in {time.perf_counter() - began:.1f} s"
    yield Line(f"{n_layers} layers ({kinds})", found)
    small = device.type != "cuda"
    batches, prompt = ((1, 2), 512) if small else (BATCHES, PROMPT_TOKENS)
    context, chunk = (256, 256) if small else (CONTEXT, CHUNK_TOKENS)
    pages = max(batches) * (-(-(context + N_STEPS + 2) // 256)) + -(-prompt // 256)
    runner = runner_of(model, device, pages=pages)
    scale = FLASH_LAYERS / n_layers
    _prefill(runner, chunk, chunk)  # kernels are chosen and loaded, experts put side by side
    seconds = _timed(runner, lambda: _prefill(runner, prompt, chunk))
    yield _rate(f"prefill, {prompt} tokens in chunks of {chunk}", prompt, seconds, scale)
    for n in batches:
        _decode(runner, n, context, 2)
        seconds = _timed(runner, lambda n=n: _decode(runner, n, context, N_STEPS))  # type: ignore[misc]
        yield _rate(f"decode, {n} requests at {context} tokens", n * N_STEPS, seconds, scale)


def _rate(what: str, n_tokens: int, seconds: float, scale: float) -> Line:
    rate = n_tokens / seconds
    return Line(what, f"{rate:,.0f} tokens/s; {rate / scale:,.0f} with {FLASH_LAYERS} layers, if each takes as long")


def _fitting_layers(device: torch.device) -> tuple[int, dict[str, object]]:
    """How many of the four layers have room, and of which model they are."""
    if device.type != "cuda":
        return 4, SMALL
    free, _ = torch.cuda.mem_get_info(device)
    for n in (4, 3, 2, 1):
        if nbytes_of(on_meta(config_of(FLASH, n), torch.bfloat16)) <= WEIGHTS_SHARE * free:
            return n, FLASH
    return 0, FLASH


def _timed(runner: ModelRunner, work: Callable[[], None]) -> float:
    runner.mark().wait()
    began = time.perf_counter()
    work()
    runner.mark().wait()
    return time.perf_counter() - began


def _prefill(runner: ModelRunner, n_tokens: int, chunk: int) -> None:
    n_vocab = runner.model.config.vocab_size
    ids = torch.randint(n_vocab, (n_tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    place = Placement(1, tuple(range(1, -(-n_tokens // 256) + 1)))
    for start in range(0, n_tokens, chunk):
        output = runner.forward([Segment(ids[start : start + chunk], start, place)])
    read_best(output.logits)


def _decode(runner: ModelRunner, n_requests: int, context: int, n_steps: int) -> None:
    """Each step's tokens are read back, as a server does. The state behind them is zero, which costs as much."""
    n_pages = -(-(context + N_STEPS + 2) // 256)
    places = [Placement(i + 1, tuple(range(i * n_pages + 1, (i + 1) * n_pages + 1))) for i in range(n_requests)]
    tokens = [7 + i for i in range(n_requests)]
    for step in range(n_steps):
        segments = [Segment([token], context + step, place) for token, place in zip(tokens, places, strict=True)]
        tokens = [max(token, 0) for token in read_best(runner.forward(segments).logits)]
