"""The detector matrix: what its tables say, that the documented ones are whole, and (slow) that they are still true."""

from __future__ import annotations

import pytest
from fault_cases import matrix
from fault_cases.matrix import COMPONENTS, DAMAGES, NONE, PLACES, Case, Matrix, cases, first_table, second_table

from server.faults.spec import FaultKind, Place
from server.transfer.checks import Check


def documented() -> list[list[str]]:
    """The rows of both tables in docs/failures.md."""
    first, _, second = matrix.DETECTORS.read().partition("Each check switched off")
    rows = [[row for row in part.splitlines() if row.startswith("| ")] for part in (first, second)]
    return [part[1:] for part in rows]


def test_the_documented_matrix_has_every_case_and_no_empty_cell() -> None:
    first, second = documented()
    rows = {tuple(cell.strip(" `") for cell in row.strip("|").split("|")[:2]) for row in first}
    assert rows == {(component, damage) for component in COMPONENTS for damage in DAMAGES}
    assert not [row for row in first if "**" in row or NONE in row]
    assert {row.split("|")[1].strip() for row in second} <= set(Check)
    assert {"stamp", "digest", "coverage", "bytes"} <= {row.split("|")[1].strip() for row in second}


def test_wrong_claims_have_one_place_and_every_other_damage_has_all() -> None:
    every = cases(COMPONENTS, DAMAGES, PLACES)
    assert len(every) == len(COMPONENTS) * (5 * len(PLACES) + 2)
    assert {case.place for case in every if case.damage is FaultKind.FORGET} == {Place.PLAN}
    assert Case("swa", FaultKind.ZERO, Place.WIRE).fault == "zero:swa@wire"
    assert Case("swa", FaultKind.FORGET, Place.PLAN).fault == "forget:swa"


def test_what_was_not_noticed_is_shown_in_bold() -> None:
    found = {Case("swa", FaultKind.ZERO, place): "digest" for place in PLACES}
    found[Case("swa", FaultKind.ZERO, Place.POOL)] = NONE
    assert first_table(found).splitlines()[-1] == "| `swa` | zero | digest | digest | digest | **none** |"


def test_cases_with_the_same_end_share_a_row() -> None:
    names = ("swa", "c4_kv", "handoff")
    damages = (FaultKind.DROP, FaultKind.ZERO)
    with_all = {Case(n, d, p): "digest" for n in names for d in damages for p in (Place.PLAN, Place.WIRE)}
    without = {(Check.DIGEST, case): "handoff" if case.component == "handoff" else NONE for case in with_all}
    without[Check.BYTES, Case("swa", FaultKind.DROP, Place.PLAN)] = "digest"
    where = "drop, zero in the copy plan and on the wire"
    assert second_table(Matrix(with_all, without).changed, names).splitlines()[2:] == [
        f"| digest | {where} | `handoff` | handoff |",
        f"| digest | {where} | every one but `handoff` | none |",
    ]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_whole_matrix_has_no_empty_cell() -> None:
    assert matrix.main(["--only", "sent", "--off"]) == 0
