"""What a client may send to ``POST /generate``: SGLang's fields, brought to those of the other routes.

``sampling_params`` are :class:`.GenerationFields` under SGLang's names. So every sampling field that is honoured on the
other routes is honoured here, and the others are refused, or named as ignored, in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)

from server.api.cache_fields import CacheFields
from server.api.errors import InvalidRequest
from server.api.fields import (
    HARMLESS_IN_GENERATE,
    REFUSED_IN_GENERATE,
    REFUSED_IN_SAMPLING_PARAMS,
    Harmless,
    ignored_fields,
    refuse_unsupported,
)
from server.api.request_id import MAX_CHARS, clean
from server.api.routed_rooms import MAX_GENERATIONS, Hosts, Ports, Rooms
from server.api.schemas import GenerationFields, Prompt, parse_prompts
from server.engine.request import MAX_LOGPROBS, SamplingParams

DEFAULT_MAX_NEW_TOKENS = 128
"""Where a request says nothing, as in SGLang."""
MAX_STREAMED_LOGPROBS = 1 << 15
"""Log probabilities that one streamed generation may come to: each chunk repeats those before."""
_INT64 = 1 << 63
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


class GenerateSampling(GenerationFields):
    """``sampling_params``; three fields have names of SGLang's own."""

    max_tokens: Annotated[int, Field(ge=0)] | None = Field(default=None, alias="max_new_tokens")
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(default=None, alias="min_new_tokens")
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = Field(default=None, alias="sampling_seed")

    refused: ClassVar[Mapping[str, Harmless]] = REFUSED_IN_SAMPLING_PARAMS
    _n_logprobs: int | None = PrivateAttr(default=None)
    _n_prompt_logprobs: int | None = PrivateAttr(default=None)

    @property
    def max_tokens_field(self) -> str:
        return "sampling_params.max_new_tokens"

    @property
    def prompt_logprobs_field(self) -> str:
        return "logprob_start_len"

    @property
    def logprobs_field(self) -> str:
        return "return_logprob"

    @property
    def n_logprobs(self) -> int | None:
        return self._n_logprobs

    @property
    def n_prompt_logprobs(self) -> int | None:
        return self._n_prompt_logprobs

    @property
    def shows_prompt(self) -> bool:
        return True  # what shows the prompt is outside of these, and looked at there

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        return super().sampling(replace(defaults, max_tokens=DEFAULT_MAX_NEW_TOKENS))

    def beside(self, *, n_logprobs: int | None, n_prompt_logprobs: int | None, **outside: Any) -> GenerateSampling:
        """These together with what the request has ``outside`` of them."""
        fields = self.model_copy(update=outside)
        fields._n_logprobs, fields._n_prompt_logprobs = n_logprobs, n_prompt_logprobs  # noqa: SLF001 - its own
        return fields


def _parse_input_ids(value: Any) -> list[Prompt] | None:
    if value is None:
        return None
    if not isinstance(value, list) or (value and not isinstance(value[0], list) and type(value[0]) is not int):
        raise ValueError("must be a list of token ids or a list of lists of token ids")
    return parse_prompts(value)


class GenerateRequest(CacheFields):
    """``POST /generate``. The prompts are in ``text`` or in ``input_ids``, one of the two."""

    model_config = ConfigDict(strict=True, extra="ignore")

    text: str | Annotated[list[str], Field(min_length=1, max_length=MAX_GENERATIONS)] | None = None
    input_ids: Annotated[
        list[Prompt] | None,
        PlainValidator(_parse_input_ids),
        WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1}, {"type": "null"}]}),
    ] = None
    sampling_params: GenerateSampling = Field(default_factory=GenerateSampling)
    rid: str | Annotated[list[str], Field(max_length=MAX_GENERATIONS)] | None = None
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Field(ge=-1)] | None = None
    top_logprobs_num: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_text_in_logprobs: bool | None = None
    stream: bool | None = None
    bootstrap_host: Hosts = None
    bootstrap_port: Ports = None
    bootstrap_room: Rooms = None

    _ignored: list[str] = PrivateAttr(default_factory=list)
    _is_batch: bool = PrivateAttr(default=False)

    @model_validator(mode="wrap")
    @classmethod
    def _account_for_every_field(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return handler(data)
        refuse_unsupported(data, REFUSED_IN_GENERATE)
        if isinstance(sampling := data.get("sampling_params"), list):
            message = f"sampling_params is a list of {len(sampling)}: only one object, for all prompts, is supported."
            raise InvalidRequest("sampling_params", message, code="unsupported")
        if sampling is None:
            data = {name: value for name, value in data.items() if name != "sampling_params"}
        request = handler(data)
        known = cls.model_fields.keys() | REFUSED_IN_GENERATE.keys() | HARMLESS_IN_GENERATE
        inner = [f"sampling_params.{name}" for name in request.sampling_params.ignored]
        ids = data.get("input_ids")
        request._ignored = [*ignored_fields(data, known), *inner]  # noqa: SLF001 - its own
        request._is_batch = isinstance(request.text or (ids and ids[0]), list)  # noqa: SLF001
        return request

    @model_validator(mode="after")
    def _check_combinations(self) -> GenerateRequest:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("text", "The prompt must be given as text or as input_ids, one of the two.")
        if self.top_logprobs_num and not self.return_logprob:
            raise InvalidRequest("top_logprobs_num", "top_logprobs_num needs return_logprob: true.")
        if self.shows_prompt and self.stream:
            message = "logprob_start_len from 0 on is not available with stream: true."
            raise InvalidRequest("logprob_start_len", message)
        n_new = DEFAULT_MAX_NEW_TOKENS if self.sampling_params.max_tokens is None else self.sampling_params.max_tokens
        n_logprobs = n_new * (1 + (self.top_logprobs_num or 0)) if self.return_logprob else 0
        if self.stream and n_logprobs > MAX_STREAMED_LOGPROBS:
            message = (
                f"max_new_tokens {n_new} with log probabilities may come to {n_logprobs} of them, and each chunk of a "
            )
            message += f"stream repeats those before: at most {MAX_STREAMED_LOGPROBS} are streamed."
            raise InvalidRequest("return_logprob", message)
        if self.sampling_params.max_tokens == 0 and not self.shows_prompt:
            message = "max_new_tokens: 0 needs return_logprob and logprob_start_len: there is no answer without them."
            raise InvalidRequest("sampling_params.max_new_tokens", message)
        rids = [self.rid] if isinstance(self.rid, str) else self.rid
        if rids is None:
            return self
        if len(rids) != len(self.prompts):
            raise InvalidRequest("rid", f"rid names {len(rids)} requests, but there are {len(self.prompts)} prompts.")
        for rid in rids:
            if not rid or clean(rid) != rid:
                raise InvalidRequest(
                    "rid", f"a rid must be 1 to {MAX_CHARS} letters, digits and characters of ._:/+=@-"
                )
        return self

    @property
    def prompts(self) -> list[Prompt]:
        if self.input_ids is not None:
            return self.input_ids
        return [self.text] if isinstance(self.text, str) else list(self.text or ())

    @property
    def prompt_field(self) -> str:
        """The field that has the prompts."""
        return "text" if self.input_ids is None else "input_ids"

    @property
    def is_many(self) -> bool:
        """Whether the answer is a list: of several prompts, of a list of one, or of several samples."""
        return self._is_batch or self.sampling_params.n_samples > 1

    def rid_of(self, index: int) -> str | None:
        """What the client calls generation ``index``, if anything."""
        return self.rid[index // self.sampling_params.n_samples] if isinstance(self.rid, list) else self.rid

    @property
    def ignored(self) -> list[str]:
        """Names of the fields that the request has and this server does not know, the first few."""
        return self._ignored

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer has log probabilities of the prompt, from position ``logprob_start_len`` on."""
        return bool(self.return_logprob) and self.logprob_start_len not in (None, -1)

    def generation_fields(self) -> GenerateSampling:
        """The request as the other routes see theirs."""
        n_top = self.top_logprobs_num or 0
        return self.sampling_params.beside(
            n_logprobs=n_top if self.return_logprob else None,
            n_prompt_logprobs=n_top if self.shows_prompt else None,
            stream=self.stream,
            cache_salt=self.cache_salt,
            extra_key=self.extra_key,
            bootstrap_host=self.bootstrap_host,
            bootstrap_port=self.bootstrap_port,
            bootstrap_room=self.bootstrap_room,
        )
