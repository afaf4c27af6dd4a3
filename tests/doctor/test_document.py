"""``docs/doctor.md`` has every check, in their order."""

from __future__ import annotations

import re
from pathlib import Path

from server.doctor.examination import CHECKS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"


def test_the_table_has_every_check_in_order() -> None:
    rows = re.findall(r"^\| ([\w ]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == ["check", *(check.subject for check in CHECKS)]
