"""What goes wrong, for both nodes and their clients: a stable code, the kind of thing it is, and a sentence.

A :class:`Failure` is plain data: it ends a room, travels in the message ``Failed``, and is what the HTTP layer answers
with. :class:`RequestFailed` is the exception that carries one to the client. Every code has one kind, by
:data:`KINDS`; what a kind means in HTTP is known to ``server.api.status`` alone.
"""

from __future__ import annotations

import enum
from dataclasses import InitVar, dataclass, field


class FailureKind(enum.StrEnum):
    """What kind of thing went wrong."""

    REQUEST = "request"
    """The request is wrong: it fails everywhere and every time."""
    NOT_FOUND = "not_found"
    """The request is for something that is not here."""
    CONFLICT = "conflict"
    """Another request has the room, or had it."""
    ABORTED = "aborted"
    """The request was given up before its end, mostly by its client."""
    INTERNAL = "internal"
    """This program failed."""
    PEER = "peer"
    """Two nodes did not bring the state over: one was lost, a write failed, or what came is not what was sent."""
    UNAVAILABLE = "unavailable"
    """A node takes no request now: it is full, it ends, or what it needs is not there."""
    DEADLINE = "deadline"
    """Something did not happen in time."""

    @property
    def may_be_retried(self) -> bool:
        """Whether another node may do better: it is neither the request's fault nor its client's wish."""
        return self in (FailureKind.INTERNAL, FailureKind.PEER, FailureKind.UNAVAILABLE, FailureKind.DEADLINE)


_CODES = {
    FailureKind.REQUEST: (
        "bad_max_tokens",
        "bad_reserve",
        "bad_room",
        "bad_sampling",
        "bad_token",
        "chat_template_error",
        "context_length_exceeded",
        "empty_prompt",
        "grammar_failed",
        "invalid_chat_template_kwargs",
        "invalid_grammar",
        "invalid_json",
        "invalid_text",
        "invalid_value",
        "no_chat_template",
        "no_token_allowed",
        "prompt_mismatch",
        "too_many_elements",
        "unknown_role",
        "unsupported",
        "wrong_role",
    ),
    FailureKind.NOT_FOUND: ("model_not_found", "room_not_found"),
    FailureKind.CONFLICT: ("duplicate_room", "room_over"),
    FailureKind.ABORTED: ("aborted",),
    FailureKind.INTERNAL: (
        "engine_error",
        "engine_stopped",
        "internal_error",
        "no_digest",
        "non_finite_logits",
    ),
    FailureKind.PEER: (
        "bad_placement",
        "component_mismatch",
        "decode_gave_up",
        "fenced",
        "peer_lost",
        "prefill_client_gone",
        "prefill_ended",
        "prefix_damaged",
        "rejected",
        "shared_page",
        "transfer_failed",
        "wrong_owner",
    ),
    FailureKind.UNAVAILABLE: (
        "engine_died",
        "no_prefill",
        "node_died",
        "not_alive",
        "not_ready",
        "overloaded",
        "room_forgotten",
        "shutting_down",
        "tokenizer_died",
        "unknown_prefill",
    ),
    FailureKind.DEADLINE: ("deadline",),
}
KINDS = {code: kind for kind, codes in _CODES.items() for code in codes}
"""Every code, and its kind."""


@dataclass(frozen=True)
class Failure:
    """Why a request or its room ends without an answer: a ``code`` of :data:`KINDS` and one sentence.

    ``component`` names the state at fault and ``check`` the check that found it, or they are empty. ``kind`` is the
    code's, or the one that another node has sent with it.
    """

    code: str
    reason: str
    component: str = ""
    check: str = ""
    sent_kind: InitVar[FailureKind | None] = None
    kind: FailureKind = field(init=False)

    def __post_init__(self, sent_kind: FailureKind | None) -> None:
        object.__setattr__(self, "kind", KINDS[self.code] if sent_kind is None else sent_kind)


def internal_error(node: str, error: Exception) -> Failure:
    """An ``error`` of this program; ``node`` is ``prefill`` or ``decode``."""
    return Failure("internal_error", f"the {node} node failed: {error!r}")


class RequestFailed(Exception):
    """A request that cannot be answered because of ``failure``.

    ``room`` is the request's, once it has one; ``param`` is the field of the client's request that is wrong, if it is
    one.
    """

    def __init__(self, failure: Failure, *, room: int | None = None, param: str | None = None) -> None:
        super().__init__(failure.reason)
        self.failure = failure
        self.room = room
        self.param = param

    @property
    def code(self) -> str:
        return self.failure.code

    @property
    def kind(self) -> FailureKind:
        return self.failure.kind

    @property
    def component(self) -> str:
        return self.failure.component
