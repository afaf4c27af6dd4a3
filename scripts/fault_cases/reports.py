"""A report of a fault that happened elsewhere, and how one is staged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fault_cases.stage import Stage

Seen = list[str]
Play = Callable[[Stage], Awaitable[Seen]]
"""Stages a fault; returns what fired. Raises :class:`fault_cases.stage.Silent` if nothing did."""


@dataclass(frozen=True)
class Entry:
    """One kind of fault. ``ids`` are its reports; ``play`` stages it; ``tests`` are files that show it otherwise.

    The ids are those of public trackers: sgl SGLang, vl vLLM, mc Mooncake, ds DeepSeek, tks TokenSpeed, llmd llm-d, tt
    and trt TensorRT-LLM, dyn Dynamo, ft FastTransformer. p-restart and d-restart are nobody's reports: each node's
    cache can be lost alone.
    """

    ids: tuple[str, ...]
    happened: str
    here: str
    """What shows here, or why it cannot happen."""
    play: Play | None = None
    tests: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.ids[0]


STAGED: list[Entry] = []


def staged(ids: tuple[str, ...], happened: str, here: str, tests: tuple[str, ...] = ()) -> Callable[[Play], Play]:
    """Puts a play into :data:`STAGED` under the reports that it is of."""

    def register(play: Play) -> Play:
        STAGED.append(Entry(ids, happened, here, play, tests))
        return play

    return register
