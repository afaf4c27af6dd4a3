"""What a section finds: lines of the table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Line:
    """``found`` of ``what``; ``ok`` is false where it is not as it must be. Plain measurements are always ok."""

    what: str
    found: str
    ok: bool = True

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> Line:
        return Line(**json.loads(text))
