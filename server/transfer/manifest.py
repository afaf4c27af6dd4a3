"""What a process says of itself before anything is transferred, and the comparison that refuses a peer by field."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from server.cache.layout import PROBE_NBYTES, ArenaLayout, ComponentLayout
from server.cache.live import LIVE_RULES
from server.cache.specs import DRAFT, SWA, Scope
from server.transfer.engines.base import TransferEngine

PROTOCOL_VERSION = 8
"""Raised whenever a message changes. Peers of different versions refuse each other."""

ABSENT = "absent"
AUTH, PEERS = "auth", "peers"
"""What a refusal names beside the fields of a manifest: the key or the address of a peer; their number."""

Incarnation = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
ShortText = Annotated[str, Meta(max_length=256)]
Name = Annotated[str, Meta(min_length=1, max_length=64)]
Count = Annotated[int, Meta(ge=0, le=2**62)]
Positive = Annotated[int, Meta(ge=1, le=2**62)]


def new_incarnation() -> str:
    """A random 128 bit name for this life of this process, as 32 hex digits."""
    return secrets.token_hex(16)


class ComponentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One component's place in its owner's arena.

    Row ``r`` of item ``i`` is at ``offset + i * item_stride + r * row_nbytes``. ``rows`` (the ring of a slot component)
    and ``items`` may differ between peers; what a row holds may not.
    """

    name: Name
    scope: Literal["page", "slot"]
    positions: Positive
    layer_ids: Annotated[tuple[Count, ...], Meta(max_length=4096)]
    width: Positive
    dtype: Name
    row_nbytes: Positive
    rows: Positive
    items: Positive
    offset: Count
    item_stride: Positive


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process as its peers need to know it.

    - ``protocol_version``: :data:`PROTOCOL_VERSION` of the sender.
    - ``role``: ``prefill`` (offers state) or ``decode`` (reads state).
    - ``incarnation``: random 128 bit, new at every process start.
    - ``transport_kind``, ``transport_version``, ``transport``: the engine (``mooncake``), its version, and the wire it
      uses (``tcp``).
    - ``session``: where a decode node's transport session for this peer listens; empty from a prefill node, which
      nobody writes to.
    - ``model``, ``tokenizer``: fingerprints of config and weights, and of the tokenizer files.
    - ``dtype``: element type of the model's activations. ``numerics``: what is rounded beyond it (``plain``,
      ``official``).
    - ``kernels``: what computes, with its version: equal for nodes whose results are equal bit for bit.
      ``deterministic``: whether that is promised.
    - ``page_size``, ``window``: tokens. ``spec_tokens``: draft tokens per step that the rings can undo.
    - ``arena_base``, ``arena_nbytes``: the registered memory; component offsets count from ``arena_base``.
    - ``components``: what the process offers (prefill) or reads (decode).
    """

    protocol_version: Count
    role: Literal["prefill", "decode"]
    incarnation: Incarnation
    transport_kind: Name
    transport_version: ShortText
    transport: ShortText
    session: ShortText
    model: ShortText
    tokenizer: ShortText
    dtype: Name
    numerics: Name
    kernels: ShortText
    deterministic: bool
    page_size: Positive
    window: Positive
    spec_tokens: Count
    arena_base: Count
    arena_nbytes: Positive
    components: Annotated[tuple[ComponentEntry, ...], Meta(min_length=1, max_length=64)]

    def layout(self) -> ArenaLayout:
        """The map of the owner's arena."""
        placed = tuple(
            ComponentLayout(**{**msgspec.structs.asdict(entry), "scope": Scope(entry.scope)})
            for entry in self.components
        )
        return ArenaLayout(self.page_size, self.window, self.arena_nbytes, placed)


@dataclass(frozen=True)
class ModelIdentity:
    """What must be the same on both sides for state to mean the same: fingerprints, activation dtype and numerics; and
    for results to be the same bits: ``kernels``. Nodes that are not ``deterministic`` need not have the same.
    """

    model: str
    tokenizer: str
    dtype: str
    kernels: str
    deterministic: bool = True
    numerics: str = "plain"


@dataclass(frozen=True)
class TransportIdentity:
    """The transport engine a process uses, as it reports itself."""

    kind: str
    version: str
    transport: str

    @staticmethod
    def of(engine: TransferEngine) -> TransportIdentity:
        return TransportIdentity(engine.kind, engine.version, engine.transport)

    @staticmethod
    def of_new(make_engine: Callable[[], TransferEngine]) -> TransportIdentity:
        """That of an endpoint which is made and closed again: the proof that it works here.

        Raises :class:`TransferError`.
        """
        engine = make_engine()
        try:
            return TransportIdentity.of(engine)
        finally:
            engine.close()


def build_manifest(
    role: Literal["prefill", "decode"],
    incarnation: str,
    identity: ModelIdentity,
    transport: TransportIdentity,
    layout: ArenaLayout,
    arena_base: int,
    *,
    spec_tokens: int,
    components: Sequence[str],
    session: str = "",
) -> Manifest:
    """Describes this process: ``arena_base`` is the address of its arena, ``components`` what it offers or reads."""
    placed = (layout.component(name) for name in components)
    entries = tuple(ComponentEntry(**{**asdict(c), "scope": c.scope.value}) for c in placed)
    return Manifest(
        protocol_version=PROTOCOL_VERSION,
        role=role,
        incarnation=incarnation,
        transport_kind=transport.kind,
        transport_version=transport.version,
        transport=transport.transport,
        session=session,
        model=identity.model,
        tokenizer=identity.tokenizer,
        dtype=identity.dtype,
        numerics=identity.numerics,
        kernels=identity.kernels,
        deterministic=identity.deterministic,
        page_size=layout.page_size,
        window=layout.window,
        spec_tokens=spec_tokens,
        arena_base=arena_base,
        arena_nbytes=layout.nbytes,
        components=entries,
    )


@dataclass(frozen=True)
class Mismatch:
    """The first difference that forbids a pairing.

    ``field`` is a manifest field, or ``components.<name>[.<field>]``.
    """

    field: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        return f"{self.field} differs: ours {self.ours}, theirs {self.theirs}"


_EQUAL_FIELDS = (
    "transport_kind",
    "transport",
    "model",
    "tokenizer",
    "dtype",
    "numerics",
    "page_size",
    "window",
)
_EQUAL_COMPONENT_FIELDS = ("scope", "positions", "layer_ids", "dtype", "width", "row_nbytes")
_ROLES = {"prefill": "decode", "decode": "prefill"}


def compare(ours: Manifest, theirs: Manifest) -> Mismatch | None:
    """Whether the two can work together: None, or the first field that differs.

    Rings (``rows`` of a slot component), item counts, offsets and ``spec_tokens`` may differ: rows are paired by
    logical position. ``transport_version`` may differ too: the engines settle that between themselves. ``kernels`` may
    if neither side is ``deterministic``. Every component that the decode side reads must be offered by the prefill
    side; the prefill side may offer more. A manifest whose components leave its own arena is refused too.
    """
    if ours.protocol_version != theirs.protocol_version:
        return Mismatch("protocol_version", str(ours.protocol_version), str(theirs.protocol_version))
    if theirs.role != _ROLES[ours.role]:
        return Mismatch("role", ours.role, theirs.role)
    for field in _EQUAL_FIELDS:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return Mismatch(field, str(mine), str(other))
    if ours.kernels != theirs.kernels and (ours.deterministic or theirs.deterministic):
        return Mismatch("kernels", ours.kernels, theirs.kernels)
    return _compare_components(ours, theirs) or _check_bounds(ours, theirs)


def refusal_label(field: str) -> str:
    """``field`` of a refusal as a label of the metrics: ``other`` for names that only the peer has chosen."""
    known = {AUTH, PEERS, *(f.name for f in msgspec.structs.fields(Manifest))}
    head, *rest = field.split(".")
    parts = {f.name for f in msgspec.structs.fields(ComponentEntry)}
    is_ours = not rest or (head == "components" and rest[0] in LIVE_RULES and parts.issuperset(rest[1:]))
    return field if head in known and is_ours else "other"


def _compare_components(ours: Manifest, theirs: Manifest) -> Mismatch | None:
    mine = {entry.name: entry for entry in ours.components}
    other = {entry.name: entry for entry in theirs.components}
    reader, offerer = (mine, other) if ours.role == "decode" else (other, mine)
    for name in reader:
        if name not in offerer:
            return Mismatch(f"components.{name}", *(("present", ABSENT) if name in mine else (ABSENT, "present")))
        for field in _EQUAL_COMPONENT_FIELDS:
            a, b = getattr(mine[name], field), getattr(other[name], field)
            if a != b:
                return Mismatch(f"components.{name}.{field}", str(a), str(b))
        if reader[name].scope == "page" and mine[name].rows != other[name].rows:
            return Mismatch(f"components.{name}.rows", str(mine[name].rows), str(other[name].rows))
    return None


def _check_bounds(ours: Manifest, theirs: Manifest) -> Mismatch | None:
    """Refuses a manifest that describes memory outside its arena, names a component twice or one nobody can count."""
    names = [entry.name for entry in theirs.components]
    if len(set(names)) != len(names):
        return Mismatch("components", "every name once", ", ".join(names))
    rings = {entry.name: entry.rows for entry in theirs.components if entry.name in (SWA, DRAFT)}
    if len(set(rings.values())) > 1:
        return Mismatch(f"components.{DRAFT}.rows", f"as many as {SWA} has", str(rings[DRAFT]))
    for entry in theirs.components:
        last = entry.offset + (entry.items - 1) * entry.item_stride + entry.rows * entry.row_nbytes
        if entry.offset < PROBE_NBYTES or last > theirs.arena_nbytes:
            held = f"{PROBE_NBYTES} .. {theirs.arena_nbytes}"
            return Mismatch(f"components.{entry.name}.offset", held, f"{entry.offset} .. {last}")
        if theirs.role == "decode" and entry.name not in LIVE_RULES:
            return Mismatch(f"components.{entry.name}", "no live rule", "present")
    return None
