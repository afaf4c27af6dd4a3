"""How the answer to a conversation is spelled: its content, reasoning, calls and log probabilities."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.api.answers import Answer, Writer, finite, token_key
from server.api.prompt_logprobs import vllm_entries
from server.chat.answer import AnswerParser, AnswerSyntax
from server.chat.events import CallBegin, Content, Event, Reasoning
from server.engine.request import Backend, FinishReason, TokenLogprob, TokenOutput

TOOL_CALLS = "tool_calls"
"""The finish reason of an answer that has ended by itself and calls tools."""


@dataclass
class ChatAnswer(Answer):
    """What one generation has given out, and what of its text is reasoning, content and calls: told as it comes."""

    parser: AnswerParser = field(default_factory=lambda: AnswerParser(AnswerSyntax()))
    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    """Names and arguments."""

    def add(self, output: TokenOutput) -> None:
        super().add(output)
        for event in events_of(self.parser, output):
            if isinstance(event, Reasoning):
                self.reasoning.append(event.text)
            elif isinstance(event, Content):
                self.content.append(event.text)
            elif isinstance(event, CallBegin):
                self.calls.append((event.name, []))
            else:
                self.calls[event.index][1].append(event.text)


def events_of(parser: AnswerParser, output: TokenOutput) -> list[Event]:
    """What an output adds to an answer."""
    events = parser.feed(output.text) if output.text else []
    if output.finish_reason is not None:
        events += parser.finish(is_cut=output.finish_reason is not FinishReason.STOP)
    return events


class ChatWriter(Writer):
    """Choices of ``chat.completion`` objects. A stream's first chunk for each choice carries the role alone.
    ``n_prompt_logprobs`` is what the field ``prompt_logprobs`` asks for.
    """

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        backend: Backend,
        prompts: Sequence[Sequence[int]],
        syntax: AnswerSyntax,
        *,
        n_prompt_logprobs: int | None = None,
    ) -> None:
        super().__init__(backend, prompts)
        self._prompts, self._n_prompt_logprobs = prompts, n_prompt_logprobs
        self._syntax = syntax
        self._streamed: dict[int, AnswerParser] = {}

    def answer(self) -> ChatAnswer:
        return ChatAnswer(parser=AnswerParser(self._syntax))

    def whole(self, answers: Sequence[Answer], pd: Mapping[str, str]) -> Any:
        """As vLLM does, with the log probabilities of the prompt beside the choices, which have it in common."""
        answer, found, n_top = super().whole(answers, pd), answers[0].prompt_logprobs, self._n_prompt_logprobs
        if found is not None and n_top is not None:
            answer["prompt_logprobs"] = vllm_entries(self._tokenizer, self._prompts[0], found, n_top)
        return answer

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        assert isinstance(answer, ChatAnswer)
        content = "".join(answer.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not answer.calls else None,
            "refusal": None,
        }
        if answer.reasoning:
            message["reasoning_content"] = "".join(answer.reasoning)
        if answer.calls:
            message["tool_calls"] = [
                {"id": _call_id(), "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
                for name, arguments in answer.calls
            ]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": _finish_reason(answer.finish_reason, bool(answer.calls)),
            "stop_reason": answer.stop_reason,
        }

    def chunk_choices(self, index: int, output: TokenOutput) -> list[dict[str, Any]]:
        choices = []
        parser = self._streamed.get(index)
        if parser is None:
            parser = self._streamed[index] = AnswerParser(self._syntax)
            choices.append(_chunk_choice(index, {"role": "assistant", "content": ""}))
        deltas = [_delta(event) for event in events_of(parser, output)]
        if not deltas and (output.logprobs or output.finish_reason is not None):
            deltas = [{}]
        for delta in deltas:
            choices.append(_chunk_choice(index, delta))
        if deltas:
            last = choices[-1]
            last["logprobs"] = self._logprobs(output.logprobs)
            if output.finish_reason is not None:
                last["finish_reason"] = _finish_reason(output.finish_reason, parser.n_calls > 0)
                last["stop_reason"] = output.stop_reason
        return choices

    def _logprobs(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not entries:
            return None
        content = []
        for entry in entries:
            top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
            content.append(self._token(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_key(self._tokenizer, token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }


def _chunk_choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(event: Event) -> dict[str, Any]:
    """One event as a stream tells of it: a call's id and name come first, its arguments in pieces."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text}
    if isinstance(event, CallBegin):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": _call_id(), "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def _finish_reason(reason: FinishReason | None, has_calls: bool) -> str | None:
    return TOOL_CALLS if has_calls and reason is FinishReason.STOP else reason


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
