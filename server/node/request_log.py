"""The one line that a node logs for each request, when it ends: a summary of its record."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from server.telemetry.record import PhaseName
from server.telemetry.rooms import DECODE, RoomRecorder

log = logging.getLogger(__name__)

_DECODE_PARTS = {
    "queue": (PhaseName.PAIR, PhaseName.QUEUE, PhaseName.RESERVE, PhaseName.PREFILL_QUEUE),
    "prefill": (PhaseName.PREFILL,),
    "transfer": (PhaseName.TRANSFER, PhaseName.DONE, PhaseName.VERIFY),
    "decode": (PhaseName.FIRST_TOKEN, PhaseName.DECODE),
}
_PREFILL_PARTS = {
    "queue": (PhaseName.PAIR, PhaseName.PREFILL_QUEUE),
    "prefill": (PhaseName.PREFILL,),
    "transfer": (PhaseName.TRANSFER,),
    "commit": (PhaseName.COMMIT,),
}


def log_end(record: RoomRecorder) -> None:
    """How a request ended, at ``info``, as ``name=value`` pairs. What failed attempts took is time in the queue."""
    if not log.isEnabledFor(logging.INFO):
        return
    parts = "".join(f" {part}_s={seconds:.3f}" for part, seconds in _parts_s(record).items())
    n_retries = record.n_attempts - 1
    log.info(
        "request id=%s room=%d %s=%s tokens_in=%d tokens_out=%d%s%s outcome=%s",
        record.request_id,
        record.room,
        "prefill" if record.node == DECODE else "decode",
        record.peer or "none",
        record.n_prompt,
        record.n_generated,
        parts,
        f" retries={n_retries}" if n_retries else "",
        record.outcome,
    )


def _parts_s(record: RoomRecorder) -> Mapping[str, float]:
    parts = _DECODE_PARTS if record.node == DECODE else _PREFILL_PARTS
    everything, last = record.seconds(), record.seconds(of_last_attempt=True)
    for seconds in (everything, last):
        seconds.pop(PhaseName.RECEIVE, None)
    parts_s = {part: sum(last.get(name, 0.0) for name in names) for part, names in parts.items()}
    parts_s["queue"] += sum(everything.values()) - sum(last.values())
    return parts_s
