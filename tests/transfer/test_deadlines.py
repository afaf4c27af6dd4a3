"""Deadlines from the command line: every phase by its name, and nothing else."""

from __future__ import annotations

from dataclasses import fields

import pytest

from server.transfer.deadlines import PHASES, DeadlineError, parse_deadlines
from server.transfer.rooms import Deadlines


def test_every_phase_can_be_set_and_the_others_keep_their_defaults() -> None:
    for phase in PHASES:
        changed = parse_deadlines([f"{phase}=2.5"])
        assert getattr(changed, f"{phase}_s") == 2.5
        different = {f.name for f in fields(Deadlines) if getattr(changed, f.name) != getattr(Deadlines(), f.name)}
        assert different - {"ping_s"} == {f"{phase}_s"}


def test_of_two_for_one_phase_the_later_counts() -> None:
    assert parse_deadlines(["prefill=1", "commit=2", "prefill=3"]) == Deadlines(prefill_s=3.0, commit_s=2.0)


def test_pings_fit_into_a_short_peer_deadline() -> None:
    assert parse_deadlines(["peer=0.6"]).ping_s == pytest.approx(0.2)
    assert parse_deadlines(["peer=60"]).ping_s == Deadlines.ping_s


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("prefil=3", "no phase 'prefil'; there are peer, connect, .*prefill"),
        ("prefill_s=3", "no phase 'prefill_s'"),
        ("ping=3", "no phase 'ping'"),
        ("prefill", "'' is no number of seconds above 0"),
        ("prefill=soon", "'soon' is no number"),
        ("prefill=0", "'0' is no number of seconds above 0"),
        ("prefill=-1", "above 0"),
        ("prefill=nan", "above 0"),
        ("prefill=inf", "above 0"),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(assignment: str, words: str) -> None:
    with pytest.raises(DeadlineError, match=words):
        parse_deadlines([assignment])
