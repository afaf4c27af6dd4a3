"""What a request is, from the HTTP layer to the engine and back: plain data that every package shares."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from server.engine.grammar import Grammar
from server.engine.prompt_logprobs import PromptLogprobs

if TYPE_CHECKING:
    from server.engine.grammar_compiler import GrammarCompiler
    from server.engine.tokenizer_process import TokenizerProcess
    from server.failure import RequestFailed

DEFAULT_MAX_TOKENS = 2048
"""Tokens to generate where neither the request nor the checkpoint says it, unless an option does."""
MAX_LOGPROBS = 20
PREFILL_ROLE = "prefill"
"""``Backend.role`` of a prefill node; that of a decode node is ``decode``."""


class FinishReason(enum.StrEnum):
    """Why a generation ended, in the words of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    ``temperature`` 0 is greedy. ``top_k`` 0 means no limit. ``logprobs`` is the number of alternatives reported beside
    the chosen token (0..20), or None for none at all. ``seed`` None lets the decode node draw one.

    The presence and the frequency penalty count tokens of the answer, the repetition penalty (1: none) those of the
    prompt too. ``min_p`` cuts off tokens with less than this part of the largest probability. ``logit_bias`` are token
    ids with what is added to their logits. None of ``bad_words`` (token ids) is ever completed by the answer.
    ``allowed_token_ids`` None means all. The whole answer matches ``grammar``. See ``docs/sampling.md``.

    ``prompt_logprobs`` is as ``logprobs``, of the prompt's own tokens. ``max_tokens`` 0: nothing but those is wanted.
    """

    max_tokens: int = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class RoutedRoom:
    """Where a router sent the same request as well: room ``room`` on the prefill node that listens at ``host:port``.

    A request with it goes to that prefill node and to no other. On the prefill node itself ``host`` and ``port`` may be
    None: only the room matters there.
    """

    room: int
    host: str | None = None
    port: int | None = None

    @property
    def address(self) -> str:
        """``host:port`` as a decode node's ``--prefill`` spells it."""
        return f"[{self.host}]:{self.port}" if ":" in (self.host or "") else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue. ``request_id`` names it in logs; ``routed`` is the room that a router chose.

    It came over HTTP at ``arrived_at`` (by ``time.monotonic``), for the span that its header ``traceparent`` named.
    ``group`` names the HTTP request, which may have many of these; empty: it has none beside it. What is kept of
    prompts is found by those of the same ``cache_salt`` only.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    routed: RoutedRoom | None = None
    arrived_at: float | None = None
    traceparent: str | None = None
    group: str = ""
    cache_salt: str = ""


@dataclass(frozen=True)
class TokenLogprob:
    """The chosen token's log probability and the most likely alternatives at that position, best first.

    ``text_offset`` is where the token's text begins in the answer's text, in characters; for a part of a character,
    where that character is. The output processor sets it.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text_offset: int = 0


class TokenOutput(msgspec.Struct, frozen=True):
    """What one engine step adds to one request. ``finish_reason`` is set on the last output only.

    ``text`` is the part of the answer that is now certain (never half a character, never part of a stop string).
    ``logprobs``, if they were asked for, has the next tokens' entries whose place in the text is certain: mostly one
    for each of ``token_ids``, and with the last output all that are left. ``completes_prompt``: the text begins with a
    character that the prompt had left unfinished, and takes the place of the U+FFFD that the prompt's text ends with.
    Of ``n_proposed`` drafted tokens of the step ``n_accepted`` stood and were given out beside the step's own one (both
    0 without speculation). ``prompt_logprobs``, if they were asked for, come with the first output.
    """

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    n_proposed: int = 0
    n_accepted: int = 0
    completes_prompt: bool = False
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True)
class RouteInfo:
    """Who served the prompt: known before the first token. ``prefill`` is ``host:port`` of the peer, or ``local``.

    ``draft_state`` says where the draft's window came from, None without speculation. ``n_retries`` prefill nodes had
    failed before. ``cached_tokens`` of the prompt were not computed, but found in the prefill node's cache.
    """

    prefill: str
    room: int | None
    transfer_bytes: dict[str, int] = field(default_factory=dict)
    draft_state: str | None = None
    n_retries: int = 0
    cached_tokens: int = 0


class Generation(Protocol):
    """A running generation. It ends with an output that has a finish reason, or with a failure. All of it happens in
    the event loop; ``abort`` may be called at any time and more than once.
    """

    @property
    def known_route(self) -> RouteInfo | None:
        """Who served the prompt; None until it is computed and committed here."""
        ...

    def listen(self, on_item: Callable[[TokenOutput | RequestFailed], object]) -> None:
        """From now on ``on_item`` gets every output, and a failure that ends them; first what has come already."""
        ...

    def abort(self) -> None: ...


class TokenizerLike(Protocol):
    """What the API needs from a tokenizer (``server.engine.tokenizer.Tokenizer`` is the real one)."""

    vocab_size: int
    eos_token_ids: frozenset[int]
    chars_per_token: int | None
    """The most characters that one token stands for; None if there is no such number."""
    grammars: GrammarCompiler

    def encode(self, text: str) -> list[int]: ...

    def encode_rendered(self, text: str) -> list[int]: ...

    def with_one_bos(self, ids: list[int]) -> list[int]: ...

    def process(self) -> TokenizerProcess: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    @property
    def chat_template(self) -> str:
        """The source of the model's chat template, or nothing."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of the token that ``text`` is."""
        ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str: ...

    def template_reads(self, name: str) -> bool:
        """Whether the chat template may read a variable or a message's field of this name."""
        ...

    def template_knows_role(self, role: str) -> bool:
        """Whether the chat template tells messages of this role from the user's, or refuses them itself."""
        ...


class Backend(Protocol):
    """What an HTTP app serves: a decode node, or a prefill node, which answers only requests with a routed room."""

    role: str
    model_name: str
    max_context: int
    tokenizer: TokenizerLike
    sampling_defaults: SamplingParams
    """From the checkpoint's generation_config.json: what applies where a request says nothing."""

    def submit(self, request: GenerationRequest) -> Generation:
        """Admits a request. Raises :class:`.RequestFailed` at once for what can never be served."""
        ...

    def alive(self) -> tuple[bool, str]: ...

    async def ready(self) -> tuple[bool, str]: ...

    def server_info(self) -> dict[str, Any]: ...

    def rooms(self, limit: int) -> Any:
        """The records of requests, as ``GET /rooms`` answers them; at most ``limit`` of each kind."""
        ...

    def room(self, room: int) -> Any:
        """The newest record of ``room``, as ``GET /rooms/{room}`` answers it, or None."""
        ...

    def state(self) -> Any:
        """What ``GET /state`` answers."""
        ...

    def flush_cache(self) -> int:
        """Forgets what is kept of prompts; how many pages that was. Requests under way go on with what they use."""
        ...

    def load(self) -> dict[str, int]:
        """What routers ask for: ``num_reqs`` under way, ``num_waiting_reqs`` of them waiting, ``num_tokens`` held of
        ``max_total_num_tokens``, and how many may run at once, ``max_running_requests``.
        """
        ...
