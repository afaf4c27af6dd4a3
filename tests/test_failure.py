"""Every failure has a code of the table, and docs/failures.md has the same table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from server.api.status import STATUS
from server.failure import KINDS, Failure, FailureKind

ROOT = Path(__file__).resolve().parent.parent


def literal_codes() -> set[str]:
    """What is written as the code of a ``Failure`` or an ``InvalidRequest`` anywhere in server/."""
    found = {"invalid_value"}
    for path in (ROOT / "server").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match call:
                case ast.Call(func=ast.Name(id="Failure"), args=[ast.Constant(value=str(code)), *_]):
                    found.add(code)
                case ast.Call(func=ast.Name(id="InvalidRequest"), keywords=keywords):
                    found |= {str(ast.literal_eval(word.value)) for word in keywords if word.arg == "code"}
    return found


def test_the_table_has_every_code_and_no_other() -> None:
    assert literal_codes() == set(KINDS)


def test_every_kind_has_a_status() -> None:
    assert set(STATUS) == set(FailureKind)
    assert all((STATUS[kind] >= 500) == kind.may_be_retried for kind in FailureKind if kind is not FailureKind.ABORTED)


def test_the_documentation_has_the_table() -> None:
    text = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
    documented = {}
    for kind, status, retried, codes in re.findall(
        r"^\| `(\w+)` \| (\d+) \| (yes|no) \|[^|]*\| ([^|]*) \|$", text, re.M
    ):
        documented[kind] = (int(status), retried == "yes", set(re.findall(r"`(\w+)`", codes)))
    codes_of = {kind: {code for code in KINDS if KINDS[code] is kind} for kind in FailureKind}
    assert documented == {kind: (STATUS[kind], kind.may_be_retried, codes_of[kind]) for kind in FailureKind}


def test_a_code_of_another_version_keeps_the_kind_it_was_sent_with() -> None:
    assert Failure("of_tomorrow", "late", sent_kind=FailureKind.DEADLINE).kind is FailureKind.DEADLINE
    with pytest.raises(KeyError):
        Failure("of_tomorrow", "late")
