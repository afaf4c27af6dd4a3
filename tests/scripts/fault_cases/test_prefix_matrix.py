"""The matrix of what is cached: what its tables say, that the documented ones are whole, and (slow) still true."""

from __future__ import annotations

import pytest
from fault_cases import matrix
from fault_cases.prefix_matrix import CASES, NOBODY, PREFIXES, RIGHT, WRONG, Case, PrefixMatrix, Seen, report

from server.faults.spec import OFFERS, PREFIX, SNAPSHOTS, FaultKind, parse_fault
from server.transfer.checks import Check

FLIP, EVICT = Case("prefill", "flip-snapshot"), Case("decode", "evict-offer")
HARMLESS = Seen(NOBODY, RIGHT)


def test_every_fault_of_what_is_cached_is_a_case_on_each_node_that_it_happens_on() -> None:
    kinds = {(case.node, parse_fault(case.fault).kind) for case in CASES}
    wanted = {("prefill", kind) for kind in SNAPSHOTS} | {("decode", kind) for kind in OFFERS}
    wanted |= {("prefill", FaultKind.FLIP_PAGE), ("decode", FaultKind.FLIP_PAGE), ("decode", FaultKind.VARY_PAGE)}
    assert kinds == wanted | {("either", FaultKind.COLLIDE_KEYS)}
    assert {kind for _, kind in wanted} == PREFIX


def test_the_documented_tables_have_every_case_and_no_wrong_answer_while_every_check_is_on() -> None:
    first, _, second = PREFIXES.read().partition("Each check switched off")
    rows = [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in first.splitlines()[2:] if row]
    assert [(node, fault) for fault, node, *_ in rows] == [(case.node, case.fault) for case in CASES]
    assert {answer for *_, answer in rows} == {RIGHT}
    assert WRONG in second  # without some check a client would have noticed


def test_what_is_different_without_a_check_is_told_by_what_is_off() -> None:
    found = {((), FLIP): Seen("hit", RIGHT), ((), EVICT): HARMLESS, ((Check.HIT,), EVICT): HARMLESS}
    found[(Check.HIT,), FLIP] = Seen(NOBODY, WRONG)
    found[(Check.DIGEST, Check.OFFER), FLIP] = Seen("hit", RIGHT)
    made = PrefixMatrix(found)
    assert not made.harmful
    first, second = report(made).split("Each check switched off")
    assert first.splitlines()[2:4] == [
        "| `flip-snapshot` | prefill | hit | right |",
        "| `evict-offer` | decode | - | right |",
    ]
    assert "3 runs. In 2 of them all was as above. In the other 1:" in second
    assert second.splitlines()[-1] == "| hit | `flip-snapshot` | prefill | - | **wrong** |"


def test_what_harms_a_client_with_every_check_on_is_told() -> None:
    assert PrefixMatrix({((), FLIP): Seen("hit", WRONG), ((), EVICT): HARMLESS}).harmful == [FLIP]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_no_damage_to_what_is_cached_harms_a_client() -> None:
    assert matrix.main(["--only", "cached", "--off"]) == 0
