"""The one line that a node logs for each request, when it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RequestEnd:
    """How a request ended. ``peer`` is the other node, or ``local``; ``phase_s`` has its phases in their order, in
    seconds; ``outcome`` is the finish reason, or the code of what went wrong.
    """

    request_id: str
    room: int | None
    peer_role: str
    peer: str
    n_prompt: int
    n_generated: int
    phase_s: Mapping[str, float]
    outcome: str
    n_retries: int = 0

    def log(self) -> None:
        """At ``info``, as ``name=value`` pairs."""
        if not log.isEnabledFor(logging.INFO):
            return
        room = "" if self.room is None else f" room={self.room}"
        phases = "".join(f" {phase}_s={seconds:.3f}" for phase, seconds in self.phase_s.items())
        retries = f" retries={self.n_retries}" if self.n_retries else ""
        log.info(
            "request id=%s%s %s=%s tokens_in=%d tokens_out=%d%s%s outcome=%s",
            self.request_id,
            room,
            self.peer_role,
            self.peer,
            self.n_prompt,
            self.n_generated,
            phases,
            retries,
            self.outcome,
        )
