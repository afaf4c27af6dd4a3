"""Each state component is needed: zeroing it between prompt and decode changes what follows, and only from when it is
read.
"""

from __future__ import annotations

import random

import pytest
import torch

from server.cache.layout import Placement
from server.model.batch import Segment
from server.model.interface import LoadedModel
from tests.support.runners import make_runner, prefill

N, PLACE = 393, Placement(2, (3, 1))
"""One token of a CSA group is open, and nine of an HCA window that closes at 511."""
STEPS = 512 - N


def logits_after(model: LoadedModel, zeroed: str | None) -> torch.Tensor:
    """Logits of the next tokens (the same for every call) after a prompt, one component's live rows zeroed."""
    rng = random.Random(0)
    ids, follow = rng.choices(range(10, 500), k=N), rng.choices(range(10, 500), k=STEPS)
    runner = make_runner(model)
    prefill(runner, ids, PLACE, 256)
    if zeroed is not None:
        for run in runner.arena.layout.live_runs(N, PLACE)[zeroed]:
            runner.arena.write(run, bytes(run.nbytes))
    return torch.cat([runner.forward([Segment([t], N + i, PLACE)]).logits for i, t in enumerate(follow)])


@pytest.fixture(scope="module")
def healthy(model: LoadedModel) -> torch.Tensor:
    return logits_after(model, None)


@pytest.mark.parametrize(
    ("name", "first_read"),
    [
        ("swa", N),
        ("c4_kv", N),
        ("c4_index", N),
        ("c128_kv", N),
        ("c4_state_a", 395),  # the open CSA group closes
        ("c4_state_b", 395),
        ("c4_index_state_a", 395),
        ("c4_index_state_b", 395),
        ("c128_state", 511),  # the open HCA window closes
    ],
)
def test_zeroing_changes_the_logits_from_its_first_reader_on(
    model: LoadedModel, healthy: torch.Tensor, name: str, first_read: int
) -> None:
    damaged = logits_after(model, name)
    differs = (healthy != damaged).any(-1).nonzero().flatten().tolist()
    assert differs, f"{name} makes no difference"
    assert differs[0] >= first_read - N
    if not name.startswith(("c4_state", "c4_index")):  # those show once the indexer picks another entry, or theirs
        assert differs[0] == first_read - N
