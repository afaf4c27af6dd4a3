"""Thousands of simulated lives of a pair: every room ends, no item has two owners, no unproved state is decoded."""

from __future__ import annotations

import pytest

from tests.transfer.simulation.world import Weather, World

WEATHERS = {
    "calm": Weather(),
    "lossy": Weather(loss=0.2, duplicate=0.2, slow=0.2),
    "aborts": Weather(loss=0.05, slow=0.2, abort=0.05),
    "bad transport": Weather(refused=0.1, unknown=0.1, bad_digest=0.2, abort=0.02),
    "lost verdicts": Weather(loss=0.5, unknown=0.4, abort=0.02),
    "bad engine": Weather(engine_fails=0.1, engine_hangs=0.1, loss=0.05),
    "prefill restarts": Weather(prefill_crash=0.05, abort=0.02, unknown=0.05, slow=0.1),
    "decode restarts": Weather(decode_crash=0.05, abort=0.02, unknown=0.05, slow=0.1),
    "reconnects": Weather(connection_lost=0.05, loss=0.1, duplicate=0.1, unknown=0.1),
    "half rooms": Weather(half_lost=0.3, http_abort=0.03, abort=0.03, loss=0.1, duplicate=0.1, slow=0.1),
    "everything": Weather(0.1, 0.1, 0.2, 0.05, 0.05, 0.05, 0.05, 0.03, 0.1, 0.01, 0.01, 0.01, 0.1, 0.02),
}
SEEDS_A_BLOCK = 75


@pytest.mark.parametrize("name", WEATHERS)
@pytest.mark.parametrize("block", range(4))
def test_every_room_ends_and_memory_has_one_owner(name: str, block: int) -> None:
    for seed in range(block * SEEDS_A_BLOCK, (block + 1) * SEEDS_A_BLOCK):
        world = World(seed, WEATHERS[name])
        try:
            world.run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        if name == "calm":
            assert not world.decode.failures
            assert not world.prefill.refused
