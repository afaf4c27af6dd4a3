"""Thousands of simulated lives of a pair: every room ends, no item has two owners, no unproved state is decoded.

And no write of a room lands outside the memory that its registration reserved for it, however late messages come.
"""

from __future__ import annotations

import pytest

from server.prefill.registrations import Registrations, Standing
from server.transfer.protocol import PeerMessage
from tests.simulation.world import Weather, World

LATE = Weather(late=0.15, duplicate=0.2, loss=0.1, connection_lost=0.05, abort=0.03, unknown=0.02)
"""Copies of messages that come whenever they like, while registrations come and go."""
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
    "late messages": LATE,
    "rooms again": Weather(again=0.5, half_lost=0.2, http_abort=0.03, abort=0.03, slow=0.1, connection_lost=0.01),
    "everything": Weather(
        loss=0.1,
        duplicate=0.1,
        slow=0.2,
        late=0.1,
        refused=0.05,
        unknown=0.05,
        engine_fails=0.05,
        engine_hangs=0.05,
        abort=0.03,
        bad_digest=0.1,
        prefill_crash=0.01,
        decode_crash=0.01,
        connection_lost=0.01,
        half_lost=0.1,
        http_abort=0.02,
        again=0.2,
    ),
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
            assert world.n_committed == world.n_asked


def live_late(n_lives: int) -> None:
    for seed in range(n_lives):
        World(seed, LATE).run()


def test_without_the_number_of_its_registration_a_late_reserve_writes_over_other_rooms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The simulation sees that fault: messages are told apart by the two incarnations only, which outlive a fence."""

    def covers(self: Registrations, message: PeerMessage, routing_id: bytes) -> bool:
        return message.decode in self._current and message.prefill == self._prefill

    monkeypatch.setattr(Registrations, "covers", covers)
    with pytest.raises(AssertionError, match="landed in"):
        live_late(SEEDS_A_BLOCK)


def test_without_an_order_of_registrations_an_old_one_ends_the_valid_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(self: Registrations, decode: str, number: int, routing_id: bytes) -> Standing:
        current = self._current.get(decode)
        is_known = current is not None and current.registration.number == number
        return Standing.CURRENT if is_known else Standing.NEW

    monkeypatch.setattr(Registrations, "judge", judge)
    with pytest.raises(AssertionError, match="was ended by one with number"):
        live_late(SEEDS_A_BLOCK)
