"""What every record of a room must be: phases that touch, and sums that are exact."""

from __future__ import annotations

from itertools import pairwise

from server.telemetry.record import PhaseName, RoomRecord


def faults_of(record: RoomRecord) -> list[str]:
    """What is wrong with a record; empty if nothing is."""
    phases = record.phases
    found = [] if phases[0].start_us == 0 else ["it does not begin at 0"]
    found += [
        f"{before.name} ends at {before.end_us}, {after.name} begins at {after.start_us}"
        for before, after in pairwise(phases)
        if before.end_us != after.start_us
    ]
    lengths = [(phase.end_us or 0) - phase.start_us for phase in phases if phase.end_us is not None]
    if any(length < 0 for length in lengths):
        found.append("a phase ends before it begins")
    if phases[-1].end_us != record.total_us or (record.total_us is not None and sum(lengths) != record.total_us):
        found.append(f"phases of {sum(lengths)} us, all of {record.total_us}")
    if record.ttft_us is not None:
        n_before = [phase.name for phase in phases].index(PhaseName.DECODE)
        if sum(lengths[:n_before]) != record.ttft_us:
            found.append(f"phases of {sum(lengths[:n_before])} us, a TTFT of {record.ttft_us}")
    if (record.phase is None) is not (record.outcome is not None):
        found.append(f"it is in {record.phase} and ended with {record.outcome}")
    return found
