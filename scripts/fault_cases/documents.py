"""The tables that these tools make in docs/failures.md."""

from __future__ import annotations

from dataclasses import dataclass

from cluster import ROOT

FAILURES = ROOT / "docs" / "failures.md"


@dataclass(frozen=True)
class Section:
    """What stands between two markers of a document."""

    name: str

    def read(self) -> str:
        return self._parts()[1].strip()

    def write(self, content: str) -> None:
        head, _, tail = self._parts()
        FAILURES.write_text(f"{head}\n\n{content}\n\n{tail}", encoding="utf-8")

    def _parts(self) -> tuple[str, str, str]:
        begin, end = f"<!-- {self.name}: begin -->", f"<!-- {self.name}: end -->"
        head, _, rest = FAILURES.read_text(encoding="utf-8").partition(begin)
        content, _, tail = rest.partition(end)
        return head + begin, content, end + tail


REPORTS = Section("reports")
DETECTORS = Section("detector matrix")
