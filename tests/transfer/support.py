"""A small geometry with every kind of component, manifests for it, and arenas full of recognisable bytes."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from server.cache.arena import Arena
from server.cache.layout import ArenaLayout
from server.cache.specs import CacheGeometry, ComponentSpec, Scope, handoff_spec
from server.transfer.manifest import Manifest, ModelIdentity, TransportIdentity, build_manifest, new_incarnation

WINDOW = 16
PAGE_SIZE = 256
IDENTITY = ModelIdentity(model="model-a", tokenizer="tokenizer-a", dtype="float32", kernels="kernels-a")
LOOPBACK = TransportIdentity("loopback", "1", "memory")


def make_geometry(
    *,
    slots: int = 5,
    pages: int = 17,
    extra_rows: int = 0,
    draft: bool = False,
    page_size: int = PAGE_SIZE,
    dtype: str = "float32",
) -> CacheGeometry:
    """2 CSA layers, 1 HCA layer, 4 in all. ``extra_rows`` lengthens every ring, as a peer that drafts would."""
    specs = [
        ComponentSpec("c4_kv", Scope.PAGE, 4, (1, 3), 8, dtype),
        ComponentSpec("c4_index", Scope.PAGE, 4, (1, 3), 4, dtype),
        ComponentSpec("c128_kv", Scope.PAGE, 128, (2,), 8, dtype),
        ComponentSpec("swa", Scope.SLOT, 1, (0, 1, 2, 3), 8, dtype, ring=WINDOW + extra_rows),
        ComponentSpec("c4_state_a", Scope.SLOT, 1, (1, 3), 16, "float32", ring=8 + extra_rows),
        ComponentSpec("c4_state_b", Scope.SLOT, 1, (1, 3), 16, "float32", ring=8 + extra_rows),
        ComponentSpec("c4_index_state_a", Scope.SLOT, 1, (1, 3), 8, "float32", ring=8 + extra_rows),
        ComponentSpec("c4_index_state_b", Scope.SLOT, 1, (1, 3), 8, "float32", ring=8 + extra_rows),
        ComponentSpec("c128_state", Scope.SLOT, 1, (2,), 16, "float32", ring=128 + extra_rows),
    ]
    if draft:
        specs.append(ComponentSpec("draft_swa", Scope.SLOT, 1, (4,), 8, dtype, ring=WINDOW + extra_rows))
    specs.append(handoff_spec(2, 8, dtype))
    return CacheGeometry(page_size, pages, slots, WINDOW, extra_rows, tuple(specs))


def make_manifest(
    role: Literal["prefill", "decode"],
    geometry: CacheGeometry | None = None,
    /,
    *,
    session: str = "",
    incarnation: str | None = None,
    arena_base: int = 1 << 20,
    **changes: object,
) -> Manifest:
    layout = ArenaLayout.from_geometry(geometry or make_geometry())
    manifest = build_manifest(
        role,
        incarnation or new_incarnation(),
        IDENTITY,
        LOOPBACK,
        layout,
        arena_base,
        spec_tokens=0,
        components=layout.names,
        session=session,
    )
    return msgspec.structs.replace(manifest, **changes)


def random_arena(layout: ArenaLayout, seed: int) -> Arena:
    """An arena in which no two places look alike."""
    arena = Arena(layout)
    arena.buffer.numpy()[:] = np.random.default_rng(seed).integers(0, 256, layout.nbytes, dtype=np.uint8)
    return arena
