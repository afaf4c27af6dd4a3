"""Faults on purpose: the vocabulary of ``--fault``, off by default, so that every check can be seen to fire.

    KIND:COMPONENT[@PLACE][:COUNT]     drop, zero, stale, shift, swap; forget, miscount
    KIND-writes[:ARGUMENT][:COUNT]     delay-writes:SECONDS, late-writes:SECONDS, fail-writes[:COMPONENT]
    KIND-message:TYPE[:COUNT]          drop-, duplicate-, reorder-, late-, corrupt-message
    KIND-page:COMPONENT[:COUNT]        flip-page, vary-page
    KIND-snapshot[:COUNT]              flip-snapshot, stale-snapshot, shift-snapshot
    KIND-offer[:COUNT]                 overwrite-offer, evict-offer
    collide-keys
    kill:PHASE[:COUNT]
    unchecked[:CHECK]

COUNT is the number of rooms (or messages) that have the fault; without it all have. Of faults of the prefix cache it
counts the rooms for which something was cached. ``kill`` is for the COUNT-th room
that enters the phase, without COUNT the first. ``@PATH`` reads faults from a file, one a line, again for every room, so
that one pair of processes can be put through all of them; counts start anew when the file changes.
"""

from __future__ import annotations

import enum
import logging
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from server.cache.live import LIVE_RULES
from server.transfer.checks import Check
from server.transfer.protocol import FromDecode, FromPrefill

log = logging.getLogger(__name__)


class FaultError(ValueError):
    """A fault that does not exist, is not written right, or happens on the other node."""


class FaultKind(enum.StrEnum):
    """What goes wrong. The first five change a component's rows, at one :class:`Place`."""

    DROP = "drop"
    """They are claimed and do not arrive. In the pool: they are taken from memory that nobody owns."""
    ZERO = "zero"
    """They arrive as zeros. In the pool: they are taken from item 0."""
    STALE = "stale"
    """They are those of the room before. In the pool: they are taken from its slot or pages."""
    SHIFT = "shift"
    """Every row is one row off. In the pool: they are taken from the next slot or pages."""
    SWAP = "swap"
    """Two rooms under way exchange theirs. In the pool: they are taken from another room's slot or pages."""

    FORGET = "forget"
    """The prefill node neither sends nor claims the component: it does not know that there is such a thing."""
    MISCOUNT = "miscount"
    """The prefill node claims one row's bytes too few."""

    DELAY_WRITES = "delay-writes"
    """A room's writes begin SECONDS later."""
    FAIL_WRITES = "fail-writes"
    """Writes (of COMPONENT) are reported refused, and not written."""
    LATE_WRITES = "late-writes"
    """A room's writes are reported as of unknown fate, and are written SECONDS later."""

    DROP_MESSAGE = "drop-message"
    DUPLICATE_MESSAGE = "duplicate-message"
    REORDER_MESSAGE = "reorder-message"
    """The message goes behind the next one, or one second later."""
    LATE_MESSAGE = "late-message"
    """The message goes when this node has registered anew: behind the first one of a later registration."""
    CORRUPT_MESSAGE = "corrupt-message"
    """One byte of the frame is inverted."""

    FLIP_PAGE = "flip-page"
    """One bit of COMPONENT is inverted in the first cached page that a room takes over, or that is offered for it."""
    VARY_PAGE = "vary-page"
    """The same in a page that is offered, as if it had been computed so: its digest is of these bytes."""
    FLIP_SNAPSHOT = "flip-snapshot"
    """One bit of the snapshot that a room goes on from is inverted."""
    STALE_SNAPSHOT = "stale-snapshot"
    """The snapshot is that of the hit before, of another prefix."""
    SHIFT_SNAPSHOT = "shift-snapshot"
    """The snapshot is of an earlier boundary of the same prefix."""
    OVERWRITE_OFFER = "overwrite-offer"
    """Offered pages are forgotten as if nobody read them, and the last one is overwritten."""
    EVICT_OFFER = "evict-offer"
    """Offered pages are forgotten while the prefill node computes."""
    COLLIDE_KEYS = "collide-keys"
    """The content key of a page does not depend on its tokens."""

    KILL = "kill"
    """The process kills itself (SIGKILL) when a room enters PHASE."""
    UNCHECKED = "unchecked"
    """One check, or every check, is not made. For measuring what it is worth."""


class Place(enum.StrEnum):
    """Where rows are changed, between the prefill node's pool and the decode node's."""

    PLAN = "plan"
    """On the prefill node, between the digest and the sending."""
    WIRE = "wire"
    """In the transport: the prefill node's memory is right, other bytes are written."""
    MEMORY = "memory"
    """In the decode node's memory, after ``Done`` and before the checks."""
    POOL = "pool"
    """In the prefill node's pool: a wrong slot or page is used, for the digest and the sending alike."""


STATE = frozenset({FaultKind.DROP, FaultKind.ZERO, FaultKind.STALE, FaultKind.SHIFT, FaultKind.SWAP})
CLAIMS = frozenset({FaultKind.FORGET, FaultKind.MISCOUNT})
TIMED = frozenset({FaultKind.DELAY_WRITES, FaultKind.LATE_WRITES})
WRITES = TIMED | {FaultKind.FAIL_WRITES}
MESSAGES = frozenset(kind for kind in FaultKind if kind.endswith("-message"))

SNAPSHOTS = frozenset({FaultKind.FLIP_SNAPSHOT, FaultKind.STALE_SNAPSHOT, FaultKind.SHIFT_SNAPSHOT})
OFFERS = frozenset({FaultKind.OVERWRITE_OFFER, FaultKind.EVICT_OFFER})
PREFIX = SNAPSHOTS | OFFERS | {FaultKind.FLIP_PAGE, FaultKind.VARY_PAGE}
"""Faults of what was cached, of a room for which there is something."""

PREFILL, DECODE = "prefill", "decode"
PHASES = {
    PREFILL: ("pair", "queued", "prefill", "transfer", "commit", "committed"),
    DECODE: ("waiting", "pair", "reserve", "queued", "prefill", "transfer", "verify", "committed", "decode"),
}
"""Phases in which a node can be killed."""
MESSAGE_TYPES = {
    PREFILL: tuple(message.__name__ for message in get_args(FromPrefill)),
    DECODE: tuple(message.__name__ for message in get_args(FromDecode)),
}
"""What each node sends."""
COMPONENT, PAGED = "COMPONENT", "PAGE COMPONENT"
PAGED_NAMES = ("c4_kv", "c4_index", "c128_kv")
"""The components that lie on pages."""
_WHAT = {
    **dict.fromkeys((FaultKind.FLIP_PAGE, FaultKind.VARY_PAGE), PAGED),
    **dict.fromkeys(TIMED, "SECONDS"),
    **dict.fromkeys(MESSAGES, "TYPE"),
    FaultKind.KILL: "PHASE",
    FaultKind.UNCHECKED: "CHECK",
}
"""What the word behind a kind is; of all others it is a component."""
_WITHOUT_TARGET = SNAPSHOTS | OFFERS | {FaultKind.COLLIDE_KEYS}
_TARGETS: dict[str, dict[str, tuple[str, ...]]] = {
    COMPONENT: {PREFILL: tuple(LIVE_RULES), DECODE: tuple(LIVE_RULES)},
    PAGED: {PREFILL: PAGED_NAMES, DECODE: PAGED_NAMES},
    "TYPE": MESSAGE_TYPES,
    "PHASE": PHASES,
    "CHECK": {PREFILL: tuple(Check), DECODE: tuple(Check)},
}
"""What a fault can be of, on each node."""


@dataclass
class Fault:
    """One fault. ``target`` is a component, message type, phase or check, by its kind.

    ``left`` counts the rooms or messages that will still have it, None for all.
    """

    kind: FaultKind
    target: str = ""
    place: Place | None = None
    seconds: float = 0.0
    left: int | None = None

    def __str__(self) -> str:
        where = f"@{self.place}" if self.place not in (None, Place.PLAN) else ""
        argument = f"{self.seconds:g}" if self.kind in TIMED else f"{self.target}{where}"
        return f"{self.kind}:{argument}" if argument else str(self.kind)

    def take(self) -> bool:
        """Whether the next room or message has it."""
        if self.left is None:
            return True
        self.left -= 1
        return self.left >= 0


@dataclass
class _FaultFile:
    """A file of faults, read again when it has changed."""

    path: Path
    _stamp: tuple[int, int, int] | None = None
    _faults: list[Fault] = field(default_factory=list)

    def faults(self, role: str | None) -> list[Fault]:
        try:
            found = self.path.stat()
        except OSError:
            self._stamp, self._faults = None, []
            return self._faults
        stamp = (found.st_mtime_ns, found.st_ino, found.st_size)
        if stamp != self._stamp:
            self._stamp = stamp
            self._faults = [fault for line in self.path.read_text().split() if (fault := _read(line, role)) is not None]
        return self._faults


class FaultSet:
    """The faults of one process, whose ``role`` is ``prefill`` or ``decode``. Empty in production."""

    def __init__(self, faults: Iterable[Fault] = (), files: Iterable[Path] = (), role: str | None = None) -> None:
        self.faults = list(faults)
        self._files = [_FaultFile(path) for path in files]
        self._role = role
        for fault in self.describe():
            log.warning("FAULT INJECTION is on: %s", fault)

    @staticmethod
    def parse(specs: Sequence[str], role: str | None = None) -> FaultSet:
        """From the command line. Raises :class:`FaultError` for one that does not exist, or not on this node."""
        files = [Path(spec[1:]) for spec in specs if spec.startswith("@")]
        return FaultSet([parse_fault(spec, role) for spec in specs if not spec.startswith("@")], files, role)

    @property
    def is_on(self) -> bool:
        return bool(self.faults or self._files)

    def describe(self) -> list[str]:
        """All of them, files by their names."""
        return [*map(str, self.faults), *(f"@{file.path}" for file in self._files)]

    def of_room(self, room: str) -> tuple[Fault, ...]:
        """The faults of the next ``room`` (named for the log): all but those of messages, phases and what is cached."""
        others = MESSAGES | PREFIX | {FaultKind.KILL, FaultKind.COLLIDE_KEYS}
        return self._take(room, lambda fault: fault.kind not in others)

    def of_cached(self, room: str) -> tuple[Fault, ...]:
        """The faults of what is cached for the next ``room``."""
        return self._take(room, lambda fault: fault.kind in PREFIX)

    @property
    def keys_collide(self) -> bool:
        """Whether content keys do not depend on tokens now."""
        return any(fault.kind is FaultKind.COLLIDE_KEYS for fault in self._current())

    @property
    def misplace_rooms(self) -> bool:
        """Whether the next room uses a wrong slot or wrong pages in the prefill node's pool."""
        return any(fault.place is Place.POOL and (fault.left is None or fault.left > 0) for fault in self._current())

    def of_message(self, message_type: str) -> tuple[Fault, ...]:
        """The faults of the next outgoing message of this type."""
        return self._take(message_type, lambda fault: fault.kind in MESSAGES and fault.target == message_type)

    def entered(self, phase: str) -> None:
        """A room has entered ``phase``. Does not return if that kills this process."""
        for fault in self._current():
            if fault.kind is not FaultKind.KILL or fault.target != phase:
                continue
            fault.left = (1 if fault.left is None else fault.left) - 1
            if fault.left == 0:
                log.warning("FAULT INJECTION: a room enters %s, this process kills itself", phase)
                os.kill(os.getpid(), signal.SIGKILL)

    def _take(self, what: str, concerns: Callable[[Fault], bool]) -> tuple[Fault, ...]:
        taken = tuple(fault for fault in self._current() if concerns(fault) and fault.take())
        for fault in taken:
            log.warning("FAULT INJECTION in %s: %s", what, fault)
        return taken

    def _current(self) -> list[Fault]:
        return [*self.faults, *(fault for file in self._files for fault in file.faults(self._role))]


def skipped_checks(faults: Iterable[Fault]) -> frozenset[Check]:
    """The checks that ``faults`` switch off."""
    targets = [fault.target for fault in faults if fault.kind is FaultKind.UNCHECKED]
    return frozenset(Check) if "" in targets else frozenset(Check(target) for target in targets)


def _read(line: str, role: str | None) -> Fault | None:
    """One line of a file that is read while the node runs: a wrong one is logged and left out."""
    try:
        return parse_fault(line, role)
    except FaultError:
        log.exception("FAULT INJECTION: a line is no fault")
        return None


def parse_fault(spec: str, role: str | None = None) -> Fault:
    """One fault. Raises :class:`FaultError`; with ``role`` also for one that the other node must be given."""
    kind_name, *arguments = spec.split(":")
    if kind_name not in list(FaultKind):
        raise FaultError(f"fault {spec!r}: no kind {kind_name!r}; there are {', '.join(FaultKind)}")
    kind = FaultKind(kind_name)
    is_optional = kind in (FaultKind.UNCHECKED, FaultKind.FAIL_WRITES)
    has_none = kind in _WITHOUT_TARGET
    has_target = bool(arguments) and not has_none and not (is_optional and arguments[0].isdecimal())
    target = arguments.pop(0) if has_target else ""
    if not target and not is_optional and not has_none:
        raise FaultError(f"fault {spec!r}: say what it is for, {kind}:{_WHAT.get(kind, COMPONENT)}")
    count = arguments.pop(0) if arguments else ""
    if arguments or (count and (not count.isdecimal() or kind is FaultKind.COLLIDE_KEYS)):
        raise FaultError(f"fault {spec!r}: {':'.join([count, *arguments])!r} is no count")
    fault = _with_target(spec, kind, target)
    fault.left = int(count) if count else None
    if role is not None and not _is_possible(fault, role):
        other = DECODE if role == PREFILL else PREFILL
        raise FaultError(f"fault {spec!r} happens on the {other} node: give it to launch_{other}")
    return fault


def _with_target(spec: str, kind: FaultKind, target: str) -> Fault:
    if kind in TIMED:
        try:
            return Fault(kind, seconds=float(target))
        except ValueError as error:
            raise FaultError(f"fault {spec!r}: {target!r} is no number of seconds") from error
    name, at, place = target.partition("@")
    if at and kind not in STATE:
        raise FaultError(f"fault {spec!r}: {kind} has no place")
    targets = _TARGETS[_WHAT.get(kind, COMPONENT)]
    wanted = [(name, (*targets[PREFILL], *targets[DECODE]))] if target else []
    for given, names in [*wanted, (place, tuple(Place))] if at else wanted:
        if given not in names:
            raise FaultError(f"fault {spec!r}: there is no {given!r}, only {', '.join(dict.fromkeys(names))}")
    return Fault(kind, name, Place(place or Place.PLAN) if kind in STATE else None)


def _is_possible(fault: Fault, role: str) -> bool:
    """Whether the fault can happen on this node."""
    if fault.kind in (FaultKind.UNCHECKED, FaultKind.FLIP_PAGE, FaultKind.COLLIDE_KEYS):
        return True
    if fault.kind in OFFERS or fault.kind is FaultKind.VARY_PAGE:
        return role == DECODE
    if fault.kind in MESSAGES or fault.kind is FaultKind.KILL:
        return fault.target in _TARGETS[_WHAT[fault.kind]][role]
    return role == (DECODE if fault.place is Place.MEMORY else PREFILL)
