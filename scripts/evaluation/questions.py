"""Questions, few-shot prompts and answers of a gsm8k-shaped data set."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Protocol

BUNDLED = Path(__file__).resolve().parents[2] / "server" / "assets" / "tiny-gsm8k"
STOP = ("Question:", "\n\n")
N_SHOTS, SEED = 4, 0

_NUMBER = r"((?:-\s*\$?|\$\s*-?)?\s*(?:\d[\d,]*(?:\.\d+)?|\.\d+))"
_MARKED = re.compile(r"####\s*" + _NUMBER)
_ANY = re.compile(_NUMBER)


class DataError(Exception):
    """A data file cannot be used. The message names the file and the line."""


class Worked(Protocol):
    """A question with its worked answer: a row of a data set, or one that is being made."""

    @property
    def question(self) -> str: ...

    @property
    def answer(self) -> str: ...


@dataclass(frozen=True)
class Problem:
    """One row: ``answer`` is a worked solution that ends in ``#### N``; ``kind``, if any, groups the report."""

    index: int
    question: str
    answer: str
    kind: str | None = None

    @property
    def gold(self) -> Decimal:
        """The number after ``####``."""
        value = marked_number(self.answer)
        if value is None:
            raise DataError(f"row {self.index}: its answer has no '#### <number>'")
        return value


def load_problems(path: Path) -> list[Problem]:
    """Reads a jsonl file of ``question``, ``answer`` and optionally ``kind``. Raises :class:`DataError`."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    problems: list[Problem] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problem = Problem(len(problems), str(row["question"]), str(row["answer"]), row.get("kind"))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"{path}:{number}: needs a JSON object with 'question' and 'answer' ({error!r})") from error
        if marked_number(problem.answer) is None:
            raise DataError(f"{path}:{number}: its answer has no '#### <number>'")
        problems.append(problem)
    if not problems:
        raise DataError(f"{path} holds no questions")
    return problems


def pick_shots(problem: Problem, pool: Sequence[Problem], n_shots: int, seed: int) -> list[Problem]:
    """``n_shots`` worked examples for ``problem``, never itself: a function of pool, seed and question index only."""
    others = [shot for shot in pool if shot.question != problem.question]
    if len(others) < n_shots:
        raise DataError(
            f"{n_shots} shots asked for question {problem.index}, but only {len(others)} other rows to draw from"
        )
    return random.Random(f"{seed}:{problem.index}").sample(others, n_shots)


def bundled_questions() -> list[tuple[Problem, str]]:
    """Every bundled question with the prompt that gsm8k gives it by default."""
    pool = load_problems(BUNDLED / "train.jsonl")
    problems = load_problems(BUNDLED / "test.jsonl")
    return [(problem, completion_prompt(problem, pick_shots(problem, pool, N_SHOTS, SEED))) for problem in problems]


def completion_prompt(problem: Worked, shots: Sequence[Worked]) -> str:
    """The text form: every shot as question and answer, then the question and a bare ``Answer:``."""
    shown = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return f"{shown}Question: {problem.question}\nAnswer:"


def chat_messages(problem: Problem, shots: Sequence[Problem]) -> list[dict[str, str]]:
    """The chat form: every shot as a user turn and an assistant turn, then the question as the last user turn."""
    messages = []
    for shot in shots:
        messages.append({"role": "user", "content": shot.question})
        messages.append({"role": "assistant", "content": shot.answer})
    return [*messages, {"role": "user", "content": problem.question}]


def marked_number(text: str) -> Decimal | None:
    """The number after the first ``####`` that has one; None where there is none (an invalid answer)."""
    found = _MARKED.search(text)
    return _decimal(found.group(1)) if found else None


def last_number(text: str) -> Decimal | None:
    """The last number anywhere in the text: what a lenient reader would take for the answer."""
    found = _ANY.findall(text)
    return _decimal(found[-1]) if found else None


def _decimal(written: str) -> Decimal:
    return Decimal(re.sub(r"[\s$,]", "", written))
