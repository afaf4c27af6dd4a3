"""The chunks of a stream, spelled as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from server.api.answers import Writer
from server.api.errors import failure_body
from server.api.generations import Generations
from server.api.prompt_logprobs import n_entries
from server.api.request_id import request_id
from server.api.schemas import StreamOptions
from server.engine.request import SamplingParams, TokenOutput
from server.failure import RequestFailed

COMMENT = b": waiting\n\n"
"""What every reader of server-sent events skips. It keeps proxies and clients from taking silence for an end."""
DONE = b"data: [DONE]\n\n"

_fast_json = msgspec.json.Encoder()
_DEL = b"\x7f"
"""The one ASCII character that the two encoders spell differently in a text."""
_ascii_json = json.JSONEncoder(separators=(",", ":"))


class StreamChunks(Protocol):
    """Spells the events of one stream."""

    def events(self, index: int, output: TokenOutput) -> list[bytes]:
        """The events for an output of generation ``index``; none if there is nothing to say."""
        ...

    def end(self) -> list[bytes]:
        """What comes behind the last output."""
        ...

    def failed(self, failure: RequestFailed) -> list[bytes]:
        """What comes instead of the rest, if the generations fail."""
        ...

    def may_be_long(self, sampling: SamplingParams) -> bool:
        """Whether the events for one output may be too long to be made in the event loop."""
        ...

    def size(self, index: int, output: TokenOutput) -> int:
        """Log probabilities in what :meth:`events` would make of this output now."""
        ...


class Chunks:
    """The events of one stream: a chunk for every choice, and the usage chunk (without choices) where ``options`` ask
    for it. The last chunk has the object ``pd``. Made while the HTTP request is handled, whose id it notes.
    """

    def __init__(self, writer: Writer, options: StreamOptions, generations: Generations) -> None:
        self._writer, self._options, self._generations = writer, options, generations
        self._n_open = len(generations)
        self._request_id = request_id()
        # All chunks of a stream begin with the same fields; the last of these is the list of choices.
        self._begin = b"data: " + to_json(writer.chunk([])).removesuffix(b"[]}")

    def events(self, index: int, output: TokenOutput) -> list[bytes]:
        """The events for an output of generation ``index``, one for each chunk; none if there is nothing to say."""
        options = self._options
        self._writer.usage.add(output)
        choices = self._writer.chunk_choices(index, output)
        more: dict[str, Any] = {}
        if options.include_usage or options.continuous_usage_stats:
            more["usage"] = self._usage() if options.continuous_usage_stats else None
        spell = exact_json if output.logprobs or output.prompt_logprobs is not None else to_json
        events = [self._event(spell([choice]), more) for choice in choices]
        if output.finish_reason is not None:
            self._n_open -= 1
            if not self._n_open and not options.include_usage:
                more["pd"] = self._pd()
                events[-1] = self._event(spell([choices[-1]]), more)
        return events

    def end(self) -> list[bytes]:
        """What comes behind the last output."""
        if not self._options.include_usage:
            return [DONE]
        more = {"usage": self._usage(), "pd": self._pd()}
        return [self._event(b"[]", more), DONE]

    def failed(self, failure: RequestFailed) -> list[bytes]:
        """An event with the error's body."""
        return [event(failure_body(failure))]

    def may_be_long(self, sampling: SamplingParams) -> bool:
        return sampling.prompt_logprobs is not None

    def size(self, index: int, output: TokenOutput) -> int:
        return n_entries([output.prompt_logprobs])

    def _usage(self) -> dict[str, Any]:
        usage = self._writer.usage
        usage.cached_tokens = self._generations.cached_tokens
        return usage.as_dict()

    def _pd(self) -> dict[str, str]:
        return pd_object(self._request_id, self._generations.route_headers)

    def _event(self, choices: bytes, more: Mapping[str, Any]) -> bytes:
        return b"".join((self._begin, choices, b"," + to_json(more)[1:] if more else b"}", b"\n\n"))


def event(data: Mapping[str, Any]) -> bytes:
    """One event."""
    return b"data: " + exact_json(data) + b"\n\n"


def to_json(value: Any) -> bytes:
    """What :func:`exact_json` says, in a fraction of its time, for a ``value`` without floats."""
    encoded = _fast_json.encode(value)
    return encoded if encoded.isascii() and _DEL not in encoded else exact_json(value)


def exact_json(value: Any) -> bytes:
    """``value`` in JSON without spaces. ASCII only, since some clients split lines at U+2028 and the like."""
    return _ascii_json.encode(value).encode()


def pd_object(request_id: str, headers: Mapping[str, str]) -> dict[str, str]:
    """What the headers of an answer say, for its body: ``{"request_id", "prefill", "room", ...}``."""
    return {"request_id": request_id} | {
        name.removeprefix("x-pd-").replace("-", "_"): value for name, value in headers.items()
    }
