"""How an answer is spelled: what text and chat completions share. Each kind has its own :class:`Writer`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from server.api.request_id import request_id
from server.engine.prompt_logprobs import PromptLogprobs
from server.engine.request import Backend, FinishReason, TokenizerLike, TokenLogprob, TokenOutput

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


@dataclass
class Usage:
    """Token counts of one HTTP request. A prompt that is sampled n times counts once. Of all prompts ``cached_tokens``
    were found in a cache.

    ``draft_steps`` counts the steps that had drafted tokens: the mean accept length is ``1 + accepted / draft_steps``.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    draft_steps: int = 0
    proposed: int = 0
    accepted: int = 0
    cached_tokens: int = 0

    def add(self, output: TokenOutput) -> None:
        self.completion_tokens += len(output.token_ids)
        self.draft_steps += output.n_proposed > 0
        self.proposed += output.n_proposed
        self.accepted += output.n_accepted

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's usage object; with speculation the completion's details, and ``draft_steps`` beside them."""
        usage: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.draft_steps:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.proposed - self.accepted,
                "draft_steps": self.draft_steps,
            }
        return usage


@dataclass
class Answer:
    """All outputs of one generation put together. ``cached_tokens`` of its prompt were found in a cache."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    completes_prompt: bool = False
    prompt_logprobs: PromptLogprobs | None = None
    cached_tokens: int = 0

    def add(self, output: TokenOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.completes_prompt |= output.completes_prompt
        self.logprobs.extend(output.logprobs)
        self.finish_reason = output.finish_reason
        self.stop_reason = output.stop_reason


class Writer(ABC):
    """Spells one response, whole or in chunks, and holds its state."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]
    n_repeated = 0
    """How much of its request a whole answer repeats: in log probabilities that take as long to spell."""

    def __init__(self, backend: Backend, prompts: Sequence[Sequence[int]]) -> None:
        self.id = f"{self.id_prefix}{request_id()}"
        self.usage = Usage(prompt_tokens=sum(map(len, prompts)))
        self._created = int(time.time())
        self._model = backend.model_name
        self._tokenizer = backend.tokenizer

    def answer(self) -> Answer:
        """What collects one generation's outputs for :meth:`choice`."""
        return Answer()

    @abstractmethod
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """The whole answer of generation ``index``."""

    @abstractmethod
    def chunk_choices(self, index: int, output: TokenOutput) -> list[dict[str, Any]]:
        """The next streamed choices of generation ``index``, one for each chunk; none if there is nothing to say."""

    def whole(self, answers: Sequence[Answer], pd: Mapping[str, str]) -> Any:
        """The whole response, for JSON."""
        choices = [self.choice(index, answer) for index, answer in enumerate(answers)]
        return self._wrap(self.object_name, choices) | {"usage": self.usage.as_dict(), "pd": pd}

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._wrap(self.chunk_object_name, choices)

    def _wrap(self, object_name: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }


def n_logprobs(entries: Sequence[TokenLogprob]) -> int:
    """Log probabilities of an answer's tokens, each of which has as many alternatives: what it costs to spell them."""
    return len(entries) * (1 + len(entries[0].top)) if entries else 0


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


def token_key(tokenizer: TokenizerLike, token_id: int) -> str:
    r"""The token's text, or ``bytes:\xe2\x80`` for a part of a character, so that such tokens stay apart."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
