"""What ends a request in the engine, by the names that clients and logs have for it (``docs/failures.md``)."""

from __future__ import annotations

from server.cache.owners import WrongOwner
from server.engine.choosing import NothingAllowed
from server.engine.guide import GrammarFailed
from server.engine.runner import SharedPage
from server.engine.sampler import NonFiniteLogits
from server.failure import Failure, RequestFailed


def failure_of(error: Exception) -> Failure:
    """``error`` as a failure: ``engine_error`` if it is none of those that are expected."""
    match error:
        case WrongOwner() | RequestFailed() | SharedPage():
            return error.failure
        case NonFiniteLogits():
            reason = "the model's output is not a number: it read state that was never written"
            return Failure("non_finite_logits", reason)
        case NothingAllowed():
            reason = "the request's own grammar, bans and allowed tokens leave no token for the next place"
            return Failure("no_token_allowed", reason)
        case GrammarFailed():
            return Failure("grammar_failed", f"the answer cannot follow its grammar any further: {error}")
        case _:
            return Failure("engine_error", f"{type(error).__name__}: {error}")
