"""What the records and metrics of a prefill node's rooms are written from."""

from __future__ import annotations

from server.engine.request import GenerationRequest
from server.failure import Failure
from server.prefill.decode_peer import DecodePeer
from server.prefill.request import PrefillRequest
from server.prefill.room import PrefillPhase
from server.telemetry.record import PhaseName
from server.telemetry.rooms import RoomRecorder, RoomRecords
from server.transfer.metrics import NodeMetrics
from server.transfer.protocol import Reserve
from server.transfer.rooms import Forget

_PHASES = {
    PrefillPhase.PREFILL: PhaseName.PREFILL,
    PrefillPhase.TRANSFER: PhaseName.TRANSFER,
    PrefillPhase.COMMIT: PhaseName.COMMIT,
}


def open_record(
    records: RoomRecords, peer: DecodePeer, reserve: Reserve, request: GenerationRequest, n_tokens: int, now: float
) -> RoomRecorder:
    """The record of a room that ``reserve`` begins."""
    record = records.open(
        reserve.room,
        request.request_id,
        n_prompt=n_tokens,
        max_new=1,
        first=PhaseName.PREFILL_QUEUE,
        began=now,
        traceparent=reserve.traceparent,
    )
    record.attempt(reserve.epoch, peer.name, None, 0)
    return record


def note_phase(records: RoomRecords, req: PrefillRequest, now: float) -> None:
    """A room has entered another phase: so does its record, or it ends."""
    record, room = req.record, req.room
    name = _PHASES.get(room.phase)
    if name is not None:
        record.enter(name, now)
    elif room.failure is not None:
        record.attempt_failed(room.failure)
        records.end(record, room.failure.code, now, room.failure)
    elif room.done is not None:
        record.moved(room.done)
        record.n_generated = record.n_steps = int(req.first is not None and req.request.sampling.max_tokens > 0)
        records.end(record, "committed", now)


def note_refused_hit(req: PrefillRequest, failure: Failure, now: float) -> None:
    """What the cache gave is damaged: the room waits in the queue again, for memory of its own."""
    if req.room.active:
        req.record.attempt_failed(failure)
        req.record.attempt(req.key.epoch, req.peer.name, None, 0)
        req.record.try_again(now, PhaseName.PREFILL_QUEUE)


def count_end(metrics: NodeMetrics, req: PrefillRequest, end: Forget) -> None:
    """A room is over on this side."""
    room = req.room
    metrics.room_ended(end.outcome, end.reason)
    for phase, seconds in room.phase_s.items():
        metrics.phase(phase, seconds)
    if end.outcome == "committed" and room.done is not None:
        metrics.phase("digest", room.done.timings.digest_s)
        metrics.transferred(req.peer.name, room.done)
        metrics.reused(room.done.n_reused)
        metrics.held(req.peer.name, sum(sent.held_nbytes for sent in room.done.sent))
