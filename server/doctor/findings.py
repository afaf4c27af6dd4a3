"""What a check found, and how it is printed."""

from __future__ import annotations

import enum
from dataclasses import dataclass

SUBJECT_WIDTH = 16


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    """The node starts, and something is worse than it could be."""
    ERROR = "error"
    """The node does not start, or serves nobody."""


@dataclass(frozen=True)
class Finding:
    """One line: how it is with one ``subject``. ``words`` of what is not ok end with what to do."""

    level: Level
    subject: str
    words: str

    def as_text(self) -> str:
        return f"{self.level:<8} {self.subject:<{SUBJECT_WIDTH}} {' '.join(self.words.split())}"


def ok(subject: str, words: str) -> Finding:
    return Finding(Level.OK, subject, words)


def warning(subject: str, words: str) -> Finding:
    return Finding(Level.WARNING, subject, words)


def error(subject: str, words: str) -> Finding:
    return Finding(Level.ERROR, subject, words)
