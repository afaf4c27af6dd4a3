"""A record as text: a bar for each phase, and the sums."""

from __future__ import annotations

from collections.abc import Iterator

from server.telemetry.record import Phase, RoomRecord

BAR = {"decode": "#", "prefill": "="}


def draw(record: RoomRecord, width: int) -> str:
    """The timeline of ``record``; the longest bar may have ``width`` characters."""
    return "\n".join(_lines(record, width))


def _lines(record: RoomRecord, width: int) -> Iterator[str]:
    yield f"room {record.room} on the {record.node} node, request {record.request_id}"
    outcome = record.outcome or f"in phase {record.phase}"
    yield f"{outcome}; {record.tokens.prompt} tokens in, {record.tokens.generated} out"
    if record.failure is not None:
        at = f" ({record.failure.component})" if record.failure.component else ""
        yield f"failed: {record.failure.code}{at}: {record.failure.reason}"
    for number, attempt in enumerate(record.attempts, 1):
        why = f", failed: {attempt.failure.code}" if attempt.failure is not None else ""
        where = f"slot {attempt.slot}, {attempt.n_pages} pages" if attempt.slot is not None else "no memory"
        yield f"attempt {number}: with {attempt.peer}, {where}{why}"
    yield ""
    yield from _bars(record, width)
    yield ""
    yield from _sums(record)
    if record.clocks is not None:
        yield (
            f"{BAR['prefill']} is the prefill node's clock: put in the middle of what passed here, give or take "
            f"{_ms(record.clocks.uncertainty_us)}"
        )
    if record.transfer is not None:
        moved = record.transfer
        speed = "" if moved.gb_s is None else f" ({moved.gb_s:.3g} GB/s)"
        nbytes, n_pieces = sum(moved.nbytes.values()), sum(moved.pieces.values())
        yield f"state: {nbytes:,} bytes in {n_pieces} pieces, {_ms(moved.writing_us)} on the way{speed}"
        yield f"prefill: {_ms(moved.compute_us)} computing in {moved.chunks} chunks, {_ms(moved.digest_us)} digests"
    tokens = record.tokens
    if tokens.proposed:
        steps = f"{tokens.generated} tokens in {tokens.steps} steps"
        yield f"drafts: {tokens.accepted} of {tokens.proposed} accepted, {steps}"


def _bars(record: RoomRecord, width: int) -> Iterator[str]:
    end_us = max((phase.start_us if phase.end_us is None else phase.end_us for phase in record.phases), default=0)
    scale = width / max(1, end_us)
    n_name = max(len(phase.name) for phase in record.phases)
    for phase in record.phases:
        start = round(phase.start_us * scale)
        length = max(1, round(((phase.end_us or end_us) - phase.start_us) * scale))
        bar = " " * min(start, width - 1) + BAR.get(phase.node, "#") * length
        yield f"{phase.name:<{n_name}} {_length(phase):>12}  |{bar[:width]:<{width}}|"


def _length(phase: Phase) -> str:
    return "..." if phase.end_us is None else _ms(phase.end_us - phase.start_us)


def _sums(record: RoomRecord) -> Iterator[str]:
    for what, end_us in (("TTFT", record.ttft_us), ("all", record.total_us)):
        if end_us is None:
            continue
        parts = [p.end_us - p.start_us for p in record.phases if p.end_us is not None and p.end_us <= end_us]
        sign = "=" if sum(parts) == end_us else "is not"
        yield f"{what}: {' + '.join(f'{part / 1000:.3f}' for part in parts)} {sign} {_ms(end_us)}"


def _ms(us: int) -> str:
    return f"{us / 1000:.3f} ms"
