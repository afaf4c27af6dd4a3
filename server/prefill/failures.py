"""What goes wrong on the prefill node, as the failure that a room ends with."""

from __future__ import annotations

from collections.abc import Sequence

from server.cache.owners import WrongOwner
from server.cache.specs import LayoutError
from server.engine.events import WRONG_OWNER, Failed
from server.prefill.kv_sender import SendResult
from server.transfer.checks import PLACEMENT, Check
from server.transfer.rooms import Failure


def broken(error: Exception) -> Failure:
    """An error of this program."""
    return Failure("internal_error", f"the prefill node failed: {error!r}", 500)


def engine_failure(event: Failed) -> Failure:
    """What the engine found."""
    if event.code == WRONG_OWNER:
        return Failure(event.code, event.message, 502, event.component, Check.STAMP)
    return Failure(event.code, event.message, 500, event.component)


def placement_failure(error: LayoutError) -> Failure:
    """Memory of this node that is not the room's own, or cannot hold it."""
    if isinstance(error, WrongOwner):
        return Failure(WRONG_OWNER, str(error), 502, error.component, Check.STAMP)
    return Failure("bad_placement", str(error), 502, error.component, PLACEMENT)


def transfer_failure(result: SendResult, components: Sequence[str]) -> Failure:
    """A batch that did not end applied; names the component if the reason does."""
    component = result.reason.partition(":")[0]
    reason = f"the transfer ended {result.outcome}: {result.reason}"
    return Failure("transfer_failed", reason, 502, component if component in components else "")
