"""A decode step on a real GPU, while torch makes every wait of the host an error."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from cuda_check.lines import Line
from cuda_check.models import SMALL, config_of, random_model, runner_of
from server.cache.device import select_rows
from server.cache.layout import Placement
from server.engine.runner import ModelRunner
from server.engine.sampler import read_best
from server.model.batch import Segment

WITH_GROUPED_PRODUCTS = ((9, 0), (10, 0))
"""Compute capabilities for which torch has them without a wait of the host (2.13)."""
N_REQUESTS, N_STEPS = 8, 5


def check(device: torch.device) -> Iterator[Line]:
    if device.type != "cuda":
        yield Line("waits of the host", "only a GPU makes any")
        return
    capability = torch.cuda.get_device_capability(device)
    raw = SMALL
    if capability not in WITH_GROUPED_PRODUCTS:
        version = ".".join(map(str, capability))
        yield Line("experts", f"compute capability {version}: torch's grouped products wait for the host; left out")
        raw = SMALL | {"n_routed_experts": 4}  # which compute side by side
    model = random_model(config_of(raw), torch.bfloat16, device, draft=True)
    for kv_dtype in ("model", "fp8"):
        runner = runner_of(model, device, kv_dtype=kv_dtype)
        _step(runner, 0)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(1, N_STEPS):
                logits = _step(runner, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found = f"{N_STEPS - 1} with drafts, {len(logits)} rows each"
        yield Line(f"steps without a wait, --kv-dtype {kv_dtype}", found)
        yield Line("tokens read back after them", f"{len(read_best(logits))}")


def _step(runner: ModelRunner, step: int) -> torch.Tensor:
    """Two tokens verified for each request, a draft behind them from the second row's streams; the target's logits."""
    places = [Placement(i + 1, (2 * i + 1, 2 * i + 2)) for i in range(N_REQUESTS)]
    start = 300 + 2 * step
    output = runner.forward([Segment([5, 6], start, place) for place in places], every_row=True)
    streams = select_rows(output.streams, [2 * i + 1 for i in range(N_REQUESTS)])
    runner.draft([Segment([7], start + 1, place) for place in places], streams)
    return output.logits
