"""What both rooms share: keys, deadlines, re-sending, tombstones, and the actions a room asks its node for.

A *room* is one request between one prefill and one decode process. The two state machines (:mod:`server.prefill.room`,
:mod:`server.decode.room`) are pure: events in, actions out, the clock passed in as a number.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from server.cache.owners import Owner
from server.failure import Failure
from server.transfer.protocol import AnyMessage, RoomMessage

TICK_S = 0.25
"""How often both ends of a control connection look at the other's silence."""


@dataclass(frozen=True)
class RoomKey:
    """One reservation attempt of one request of one decode process; owns slots, pages and transfer jobs."""

    room: int
    epoch: int
    decode: str

    @classmethod
    def of(cls, message: RoomMessage) -> RoomKey:
        """The key of the room that ``message`` is about."""
        return cls(message.room, message.epoch, message.decode)

    @property
    def owner(self) -> Owner:
        """What its slots and pages are stamped with."""
        return Owner(self.room, self.epoch)

    def __str__(self) -> str:
        return str(self.owner)


@dataclass(frozen=True)
class Deadlines:
    """How long each phase may stay silent, in seconds, counted from the last sign of life in it.

    - ``peer_s``: no frame from a peer -> it is lost (pings every ``ping_s``).
    - ``connect_s``: no connection to a peer; a living peer registers anew (restart, fence), until then D's queue waits
      for it. ``register_s``: a connected peer does not answer ``Register``.
    - ``admission_s``: D's own queue does not move. ``reserve_s``: P does not answer a ``Reserve``.
    - ``pair_s``: of the two halves of a room that a router chose, D's and P's HTTP request, one does not come.
    - ``queued_s``, ``prefill_s``, ``transfer_s``: D hears nothing of the room, or P's queue, engine or sender does not
      move.
    - ``commit_s``: P's ``Done`` is not answered, or D's digests do not end.
    - ``quiesce_s``: an ``Abort`` is not answered -> fence; or a ``Failed`` is not acknowledged -> P forgets the room.
    - ``probe_s``: a readiness probe. ``resend_s``, ``resend_cap_s``: first and longest interval between two sendings.
    """

    peer_s: float = 3.5
    ping_s: float = 1.0
    connect_s: float = 5.0
    register_s: float = 5.0
    admission_s: float = 120.0
    reserve_s: float = 10.0
    pair_s: float = 10.0
    queued_s: float = 60.0
    prefill_s: float = 60.0
    transfer_s: float = 30.0
    commit_s: float = 30.0
    quiesce_s: float = 30.0
    probe_s: float = 3.0
    resend_s: float = 0.5
    resend_cap_s: float = 4.0


class Resend:
    """When to send again: after ``first_s``, then doubling up to ``cap_s``."""

    def __init__(self, first_s: float, cap_s: float, now: float) -> None:
        self._interval_s, self._cap_s = first_s, cap_s
        self._at = now + first_s

    def due(self, now: float) -> bool:
        """True once per interval; the next one is twice as long."""
        if now < self._at:
            return False
        self._interval_s = min(self._interval_s * 2, self._cap_s)
        self._at = now + self._interval_s
        return True


class Heartbeat:
    """Whether the other side is silent for too long.

    A late tick (this process was stopped) extends the patience by its lateness.
    """

    def __init__(self, silence_s: float, now: float) -> None:
        self._silence_s = silence_s
        self._heard, self._ticked = now, now

    def heard(self, now: float) -> None:
        self._heard = max(self._heard, now)

    def silent_for(self, now: float) -> float:
        return now - self._heard

    def tick(self, now: float, interval_s: float) -> bool:
        """Called about every ``interval_s``; True when the peer counts as lost."""
        lateness = now - self._ticked - 2 * interval_s
        self._ticked = now
        if lateness > 0:
            self._heard = min(now, self._heard + lateness)
        return now - self._heard > self._silence_s


@dataclass(frozen=True)
class Tombstone:
    """What is remembered of a room that is over: its last epoch, why, and whether its writes have surely ended."""

    epoch: int
    failure: Failure | None
    clean: bool


class Tombstones:
    """The last rooms that ended, by decode process and room: ``capacity`` for each process.

    For those that had to be forgotten there is the highest of their epochs: none up to it is taken again. What is not
    clean is never forgotten.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._capacity = capacity
        self._stones: dict[str, OrderedDict[int, Tombstone]] = {}
        self._forgotten: dict[str, int] = {}
        self._dirty: dict[RoomKey, Failure | None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._stones.values()))

    def add(self, key: RoomKey, failure: Failure | None, *, clean: bool) -> None:
        if not clean:
            self._dirty[key] = failure
        stones = self._stones.setdefault(key.decode, OrderedDict())
        known = stones.pop(key.room, None)
        newest = known if known is not None and known.epoch > key.epoch else Tombstone(key.epoch, failure, clean)
        stones[key.room] = newest
        while len(stones) > self._capacity:
            _, oldest = stones.popitem(last=False)
            self._forgotten[key.decode] = max(oldest.epoch, self._forgotten.get(key.decode, 0))

    def refuses(self, key: RoomKey) -> Tombstone | None:
        """The tombstone that forbids a new ``Reserve`` of ``key``: this epoch or a later one is over."""
        stones = self._stones.get(key.decode)
        stone = stones.get(key.room) if stones is not None else None
        if stone is not None and stone.epoch >= key.epoch:
            return stone
        if key.epoch <= self._forgotten.get(key.decode, 0):
            reason = f"{key} is older than the last {self._capacity} rooms that ended, and may be one before them"
            return Tombstone(key.epoch, Failure("room_forgotten", reason), clean=True)
        return None

    def clean(self, key: RoomKey) -> bool:
        """False if some write of ``key`` may still land."""
        return key not in self._dirty

    def drop_peer(self, decode: str) -> None:
        """Forgets a decode process whose registration is over: no message of that registration is obeyed any more."""
        self._stones.pop(decode, None)
        self._forgotten.pop(decode, None)
        for key in [key for key in self._dirty if key.decode == decode]:
            del self._dirty[key]


# --- events that both rooms take ---


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class PeerLost:
    """The other process is gone, or our registration with it is."""

    failure: Failure


@dataclass(frozen=True)
class GivenUp:
    """This node will not go on with the room: it was refused, its client is gone, or something here failed."""

    failure: Failure


# --- actions ---


@dataclass(frozen=True)
class Send:
    """Send ``message`` to the other process."""

    message: AnyMessage


@dataclass(frozen=True)
class Forget:
    """The room is over on this side. ``clean`` is False if some of its writes may still land."""

    outcome: str
    reason: str
    clean: bool = True
