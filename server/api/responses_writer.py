"""How a response is spelled, whole and as a stream of typed events."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.api.answers import Answer, Writer
from server.api.chunks import exact_json, pd_object, to_json
from server.api.errors import InvalidRequest, failure_body
from server.api.generations import Generations
from server.api.request_id import request_id
from server.api.responses_items import Fields, ResponseAnswer
from server.chat.answer import AnswerParser, AnswerSyntax
from server.engine.request import Backend, FinishReason, SamplingParams, TokenOutput
from server.failure import FailureKind, RequestFailed

_NBYTES_PER_LOGPROB = 64
_SAME: Fields = {
    "background": False,
    "previous_response_id": None,
    "max_tool_calls": None,
    "truncation": "disabled",
    "store": False,
}
"""What is the same in every response."""


@dataclass(frozen=True)
class Echo:
    """What every response repeats of its request: as an object, and as JSON of ASCII characters."""

    fields: Fields
    spelled: bytes

    @classmethod
    def of(cls, fields: Fields) -> Echo:
        """What it costs follows the size of the request.

        :raises InvalidRequest: it cannot be spelled: a number that is none, or a text that is no Unicode.
        """
        fields = {**_SAME, **fields}
        try:
            json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            message = f"The request cannot be repeated in its answer: {error}."
            raise InvalidRequest(None, message, code="invalid_text") from error
        return cls(fields, exact_json(fields))


class ResponsesWriter(Writer):
    """One ``response`` object. ``end_id`` is the token that ends reasoning, if there is one."""

    id_prefix = "resp_"
    object_name = chunk_object_name = "response"

    def __init__(
        self, backend: Backend, prompt: Sequence[int], syntax: AnswerSyntax, echo: Echo, *, end_id: int | None
    ) -> None:
        super().__init__(backend, [prompt])
        self._syntax, self._echo, self._end_id = syntax, echo, end_id
        self.n_repeated = len(echo.spelled) // _NBYTES_PER_LOGPROB

    def answer(self) -> ResponseAnswer:
        return ResponseAnswer(parser=AnswerParser(self._syntax), end_id=self._end_id)

    def whole(self, answers: Sequence[Answer], pd: Mapping[str, str]) -> Any:
        return {**self.choice(0, answers[0]), **self._echo.fields, "pd": pd}

    def choice(self, index: int, answer: Answer) -> Fields:
        """The response at its end, without what it repeats of the request."""
        assert isinstance(answer, ResponseAnswer)
        is_cut = answer.finish_reason is not FinishReason.STOP
        reason = {"reason": "max_output_tokens"} if answer.finish_reason is FinishReason.LENGTH else None
        return {
            **self.unfinished("incomplete" if is_cut else "completed"),
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": reason,
            "output": answer.items.output(),
            "usage": self._usage(answer),
        }

    def chunk_choices(self, index: int, output: TokenOutput) -> list[Fields]:
        raise NotImplementedError  # a stream has events of many types: see ResponsesChunks

    def chunks(self, generations: Generations) -> ResponsesChunks:
        """The events of a stream of the one generation in ``generations``."""
        return ResponsesChunks(self, generations)

    def unfinished(self, status: str) -> Fields:
        """The response while it has nothing to say of its end."""
        return {
            "id": self.id,
            "object": self.object_name,
            "created_at": self._created,
            "status": status,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "usage": None,
        }

    def spell(self, fields: Fields) -> bytes:
        """``fields`` with what the response repeats of its request."""
        return to_json(fields)[:-1] + b"," + self._echo.spelled[1:]

    def _usage(self, answer: ResponseAnswer) -> Fields:
        usage = self.usage.as_dict()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {
                "reasoning_tokens": answer.n_reasoning_tokens(),
                **usage.get("completion_tokens_details", {}),
            },
            "total_tokens": usage["total_tokens"],
        }


class ResponsesChunks:
    """The events of one stream, numbered from 0. The last one has the whole response, with its usage and ``pd``. Made
    while the HTTP request is handled, whose id it notes.
    """

    def __init__(self, writer: ResponsesWriter, generations: Generations) -> None:
        self._writer, self._generations = writer, generations
        self._answer = writer.answer()
        self._n_sent = 0
        self._request_id = request_id()

    def events(self, index: int, output: TokenOutput) -> list[bytes]:
        """The events for an output; before the first of all, that there is a response."""
        self._writer.usage.add(output)
        return [*self._begin(), *(self._event(told) for told in self._answer.tell(output))]

    def end(self) -> list[bytes]:
        """The whole response."""
        self._writer.usage.cached_tokens = self._generations.cached_tokens
        return [self._response_event(self._writer.choice(0, self._answer))]

    def failed(self, failure: RequestFailed) -> list[bytes]:
        """A response that failed, with the error and the output up to then."""
        error = failure_body(failure)["error"]
        code = "invalid_prompt" if failure.kind is FailureKind.REQUEST else "server_error"
        response = {
            **self._writer.unfinished("failed"),
            "error": {**error, "code": code, "failure": failure.code},  # the client knows no other codes
            "output": self._answer.items.output(),
        }
        return [*self._begin(), self._response_event(response)]

    def may_be_long(self, sampling: SamplingParams) -> bool:
        """Never: its events have no log probabilities, and what they repeat of the request is spelled before."""
        return False

    def size(self, index: int, output: TokenOutput) -> int:
        return 0

    def _begin(self) -> list[bytes]:
        if self._n_sent:
            return []
        response = self._writer.unfinished("in_progress")
        return [self._response_event(response, type_) for type_ in ("response.created", "response.in_progress")]

    def _response_event(self, response: Fields, type_: str | None = None) -> bytes:
        """``type_`` None: the response is at its end, which its status tells of."""
        if type_ is None:
            type_ = f"response.{response['status']}"
            response = {**response, "pd": pd_object(self._request_id, self._generations.route_headers)}
        return self._spelled(type_, b',"response":' + self._writer.spell(response) + b"}")

    def _event(self, told: Fields) -> bytes:
        return self._spelled(told["type"], b"," + to_json({name: told[name] for name in told if name != "type"})[1:])

    def _spelled(self, type_: str, rest: bytes) -> bytes:
        """One event, whose type comes first."""
        number, self._n_sent = self._n_sent, self._n_sent + 1
        name = type_.encode()
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d%b\n\n' % (name, name, number, rest)
