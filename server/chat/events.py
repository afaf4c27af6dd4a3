"""What an answer consists of, in the order in which it is written. All texts put together are independent of how the
answer was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Some of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Some of what the answer says."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """Call ``index`` (from 0) of the answer begins: of the function ``name``."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Some of the arguments of call ``index``, as JSON. Of a call that was cut they are no whole object."""

    index: int
    text: str


Event = Reasoning | Content | CallBegin | CallArguments


def joined(events: Iterable[Event]) -> list[Event]:
    """``events`` with neighbours of one kind as one, and without empty texts."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, CallBegin):
            result.append(event)
        elif not event.text:
            continue
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + event.text)
        elif isinstance(event, CallArguments) and isinstance(last, CallArguments) and last.index == event.index:
            result[-1] = CallArguments(event.index, last.text + event.text)
        else:
            result.append(event)
    return result
