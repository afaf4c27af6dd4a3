"""What a response gives out: items of reasoning, text and calls, and the events that tell of them as they come."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from server.api.answers import Answer
from server.api.chat_writer import events_of
from server.chat.answer import AnswerParser, AnswerSyntax
from server.chat.events import CallArguments, CallBegin, Event, Reasoning
from server.engine.request import FinishReason, TokenOutput

Fields = dict[str, Any]
"""Of an event or an object of the API."""


@dataclass
class OpenItem:
    """An item that is being written: its fields that do not change, and its text in pieces."""

    fields: Fields
    prefix: str
    """What its events of text are called."""
    pieces: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return str(self.fields["type"])

    @property
    def is_call(self) -> bool:
        return self.kind == "function_call"

    def part(self, text: str) -> Fields:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def item(self, status: str) -> Fields:
        """The item as it is now; at its very beginning it has no content yet."""
        text = "".join(self.pieces)
        if self.is_call:
            return {**self.fields, "status": status, "arguments": text}
        return {**self.fields, "status": status, "content": [] if status == "in_progress" else [self.part(text)]}


class ResponseItems:
    """The items of one response, made of the events of its answer. Each event closes the item before, if it is of
    another kind. The events that are given back have no sequence number yet.
    """

    def __init__(self) -> None:
        self._done: list[Fields] = []
        self._open: OpenItem | None = None

    def output(self) -> list[Fields]:
        """All items so far; one that is not at its end is incomplete."""
        return [*self._done, *([] if self._open is None else [self._open.item("incomplete")])]

    def add(self, event: Event) -> list[Fields]:
        """What is told of ``event``."""
        if isinstance(event, CallBegin):
            call = {"type": "function_call", "id": _id("fc"), "call_id": _id("call"), "name": event.name}
            return self._begin(OpenItem(call, "response.function_call_arguments"))
        if isinstance(event, CallArguments):
            return self._add_text(event.text, "function_call", list)
        if isinstance(event, Reasoning):
            return self._add_text(event.text, "reasoning", self._begin_reasoning)
        return self._add_text(event.text, "message", self._begin_message)

    def finish(self, *, is_cut: bool) -> list[Fields]:
        """What is told at the end. A response without any item has a message without text. ``is_cut``: the last item
        would have gone on.
        """
        events = [] if self._done or self._open is not None else self._begin_message()
        return events + self._close("incomplete" if is_cut else "completed")

    def _begin_reasoning(self) -> list[Fields]:
        reasoning = {"type": "reasoning", "id": _id("rs"), "summary": []}
        return self._begin(OpenItem(reasoning, "response.reasoning_text"))

    def _begin_message(self) -> list[Fields]:
        message = {"type": "message", "id": _id("msg"), "role": "assistant"}
        return self._begin(OpenItem(message, "response.output_text"))

    def _begin(self, item: OpenItem) -> list[Fields]:
        events = self._close("completed")
        self._open = item
        where: Fields = {"output_index": len(self._done)}
        events.append({"type": "response.output_item.added", **where, "item": item.item("in_progress")})
        if not item.is_call:
            events.append({"type": "response.content_part.added", **self._where(item), "part": item.part("")})
        return events

    def _add_text(self, text: str, kind: str, begin: Callable[[], list[Fields]]) -> list[Fields]:
        events = [] if self._open is not None and self._open.kind == kind else begin()
        item = self._open
        assert item is not None
        item.pieces.append(text)
        events.append({"type": f"{item.prefix}.delta", **self._where(item), "delta": text, **_logprobs(item)})
        return events

    def _close(self, status: str) -> list[Fields]:
        item, self._open = self._open, None
        if item is None:
            return []
        text, where, done = "".join(item.pieces), self._where(item), item.item(status)
        what = {"arguments": text, "name": item.fields["name"]} if item.is_call else {"text": text}
        events: list[Fields] = [{"type": f"{item.prefix}.done", **where, **what, **_logprobs(item)}]
        if not item.is_call:
            events.append({"type": "response.content_part.done", **where, "part": item.part(text)})
        events.append({"type": "response.output_item.done", "output_index": len(self._done), "item": done})
        self._done.append(done)
        return events

    def _where(self, item: OpenItem) -> Fields:
        where = {"item_id": item.fields["id"], "output_index": len(self._done)}
        return where if item.is_call else {**where, "content_index": 0}


def _logprobs(item: OpenItem) -> Fields:
    """The types of OpenAI's client want them in events of text. They cannot be asked for."""
    return {"logprobs": []} if item.kind == "message" else {}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


@dataclass
class ResponseAnswer(Answer):
    """What one generation has given out, and the items that are made of it. ``end_id`` is the token that ends
    reasoning, if there is one.
    """

    parser: AnswerParser = field(default_factory=lambda: AnswerParser(AnswerSyntax()))
    items: ResponseItems = field(default_factory=ResponseItems)
    end_id: int | None = None
    _n_tokens: int = 0
    _n_before_end: int | None = None

    def add(self, output: TokenOutput) -> None:
        super().add(output)
        self.tell(output)

    def tell(self, output: TokenOutput) -> list[Fields]:
        """What is told of ``output``, whose text is not kept outside of the items."""
        if self._n_before_end is None and self.end_id in output.token_ids:
            self._n_before_end = self._n_tokens + output.token_ids.index(self.end_id)
        self._n_tokens += len(output.token_ids)
        told = [each for event in events_of(self.parser, output) for each in self.items.add(event)]
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            told += self.items.finish(is_cut=output.finish_reason is not FinishReason.STOP)
        return told

    def n_reasoning_tokens(self) -> int | None:
        """Tokens before the one that ends the reasoning; None if it was ended otherwise: by a call."""
        kinds = [item["type"] for item in self.items.output()]
        if "reasoning" not in kinds:
            return 0
        if self._n_before_end is not None:
            return self._n_before_end
        return self._n_tokens if set(kinds) == {"reasoning"} else None
