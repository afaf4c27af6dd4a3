"""What a client may send: the fields that are honoured, with their types and ranges.

What becomes of all others, and which of them the answer names as ignored, is decided in :mod:`server.api.fields`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from server.api.cache_fields import CacheFields
from server.api.chat_fields import MAX_CALLS, ChatFields, check_calls
from server.api.errors import InvalidRequest
from server.api.fields import (
    REFUSED,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    Harmless,
    ignored_fields,
    refuse_unsupported,
)
from server.api.grammar_fields import GrammarFields
from server.api.prompt_fields import PromptFields
from server.api.routed_rooms import MAX_GENERATIONS, Hosts, Ports, Rooms
from server.api.sampling_fields import SamplingFields
from server.engine.request import MAX_LOGPROBS, SamplingParams

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 1024
MAX_SAMPLES = 128
MAX_STOP_CHARS = 4096
MAX_MESSAGES = 4096
_INT64 = 1 << 63

Prompt = str | list[int]
"""One prompt: a text, or the token ids themselves."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted and without effect: it pads a hosted service's chunks."""


class GenerationFields(SamplingFields, GrammarFields, PromptFields, CacheFields):
    """What both kinds of completion share. None means: the server's default."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    user: str | None = None
    bootstrap_host: Hosts = None
    bootstrap_port: Ports = None
    bootstrap_room: Rooms = None

    refused: ClassVar[Mapping[str, Harmless]] = REFUSED
    """The fields of the schemas that are not built, each with the values that change nothing."""
    _ignored: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _account_for_every_field(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        refuse_unsupported(data, cls.refused)
        fields = handler(data)
        known = {field.alias or name for name, field in cls.model_fields.items()}
        ignored = ignored_fields(data, known | cls.refused.keys())
        if isinstance(options := data.get("stream_options"), dict):
            ignored += ignored_fields(options, StreamOptions.model_fields, "stream_options.")
        fields._ignored = ignored  # noqa: SLF001 - its own; pydantic takes any name without _ for a field of the body
        return fields

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that the request has and this server does not know, the first few."""
        return self._ignored

    @field_validator("stop")
    @classmethod
    def _check_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        for text in [stop] if isinstance(stop, str) else stop or ():
            if not text:
                raise ValueError("a stop string must not be empty")
            if len(text) > MAX_STOP_CHARS:
                raise ValueError(f"a stop string has {len(text)} characters: at most {MAX_STOP_CHARS} are allowed")
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise ValueError("a stop string has a lone surrogate: it is not Unicode")
        return stop

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options", "stream_options is only allowed with stream: true.")
        return self

    @model_validator(mode="after")
    def _check_prompt_fields(self) -> GenerationFields:
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequest("prompt_logprobs", "prompt_logprobs is not available with stream: true.")
        if self.asked_max_tokens == 0 and not self.shows_prompt:
            field = self.max_tokens_field
            raise InvalidRequest(field, f"{field}: 0 needs echo or prompt_logprobs: there is no answer without them.")
        return self

    @property
    def n_samples(self) -> int:
        return self.n or 1

    @property
    def n_generated(self) -> int:
        """How many are generated for each prompt; the best ``n_samples`` of them are the answer."""
        return self.n_samples

    @property
    def asked_max_tokens(self) -> int | None:
        """What the request itself says; the newer of the two names wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_field(self) -> str:
        """The name of the field that :attr:`asked_max_tokens` came in."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def n_logprobs(self) -> int | None:
        """How many alternatives are wanted beside each token's own log probability; None for no log probabilities."""
        raise NotImplementedError

    @property
    def n_kept_logprobs(self) -> int | None:
        """The same, also where they only say which answers are the best: those with the largest sum."""
        return 0 if self.n_logprobs is None and self.n_generated > self.n_samples else self.n_logprobs

    @property
    def logprobs_field(self) -> str:
        """The name of the field that asks for what :attr:`n_kept_logprobs` says."""
        return "best_of" if self.n_logprobs is None else "logprobs"

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """This request's parameters, with ``defaults`` where it says nothing."""
        asked: dict[str, Any] = {
            "max_tokens": self.asked_max_tokens,
            "min_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "seed": self.seed,
            "stop": (self.stop,) if isinstance(self.stop, str) else None if self.stop is None else tuple(self.stop),
            "stop_token_ids": None if self.stop_token_ids is None else tuple(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
            "logprobs": self.n_kept_logprobs,
            "prompt_logprobs": self.n_prompt_logprobs,
            **self.asked_edits(),
        }
        return replace(defaults, **{name: value for name, value in asked.items() if value is not None})


def parse_prompts(value: Any) -> list[Prompt]:
    """The prompts of a completion request: a string, a list of strings, token ids, or a list of lists of token ids.

    The ids themselves are not looked at here: whoever knows the context and the vocabulary does, after their number.

    :raises ValueError: says which element is wrong.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError("must be a string, a list of strings, a list of token ids or a list of lists of token ids")
    if not value:
        raise ValueError("the prompt is empty: it must have at least one token")
    if type(value[0]) is int:
        return [value]
    if len(value) > MAX_GENERATIONS:
        raise ValueError(f"the list has {len(value)} prompts: at most {MAX_GENERATIONS} are allowed")
    if isinstance(value[0], str):
        for i, text in enumerate(value):
            if not isinstance(text, str):
                raise ValueError(f"element {i} is not a string as the first one is")
        return list(value)
    for i, ids in enumerate(value):
        if not isinstance(ids, list):
            raise ValueError(f"element {i} is neither a string nor a list of token ids")
        if not ids:
            raise ValueError(f"prompt {i} is empty: it must have at least one token")
    return list(value)


class CompletionRequest(GenerationFields):
    """``POST /v1/completions``."""

    refused = REFUSED_IN_COMPLETIONS

    prompt: Annotated[
        list[Prompt],
        PlainValidator(parse_prompts),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    {
                        "type": "array",
                        "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                        "minItems": 1,
                    },
                ]
            }
        ),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None

    @model_validator(mode="after")
    def _check_combinations(self) -> CompletionRequest:
        if self.n_generated < self.n_samples:
            raise InvalidRequest("best_of", f"best_of {self.best_of} is less than n {self.n_samples}.")
        if self.stream and self.n_generated > self.n_samples:
            raise InvalidRequest("best_of", "best_of is not allowed with stream: true: the best are known at the end.")
        return self

    @property
    def n_generated(self) -> int:
        return self.n_samples if self.best_of is None else self.best_of

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def n_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((n for n in wanted if n is not None), default=None)

    @property
    def shows_prompt(self) -> bool:
        return bool(self.echo) or self.prompt_logprobs is not None


class ChatMessage(BaseModel):
    """One message. Fields that are not named here are handed to the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)] | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(max_length=MAX_CALLS), AfterValidator(check_calls)] | None = None

    @field_validator("content", mode="after")
    @classmethod
    def _text_only(cls, content: str | list[dict[str, Any]] | None) -> str | list[dict[str, Any]] | None:
        for part in content if isinstance(content, list) else ():
            if part.get("type") != "text":
                raise ValueError(
                    f"content parts of type {reprlib.repr(part.get('type'))} are not supported: only text is"
                )
            if not isinstance(part.get("text"), str):
                raise ValueError("a text part needs a string in its text field")
        return content

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role {reprlib.repr(self.role)} needs a content")
        return self

    @property
    def extra(self) -> dict[str, Any]:
        """All fields but role and content that say something."""
        extra = {**(self.model_extra or {}), "tool_calls": self.tool_calls}
        return {name: value for name, value in extra.items() if value}

    def for_template(self) -> dict[str, Any]:
        """The message with its content as one string; text parts are joined by newlines."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part["text"] for part in content)
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": self.role, "content": content or "", **(self.model_extra or {}), **calls}


class ChatCompletionRequest(GenerationFields, ChatFields):
    """``POST /v1/chat/completions``."""

    refused = REFUSED_IN_CHAT

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _check_kwargs(cls, kwargs: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in ("messages", "add_generation_prompt"):
            if name in (kwargs or {}):
                raise ValueError(f"{name} is a field of the request itself")
        return kwargs

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs: true.")
        return self

    @property
    def n_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
