from __future__ import annotations

from server.cache.handoff import handoff_spec
from server.cache.specs import CacheGeometry, ComponentSpec, Scope


def small_geometry(*, k: int = 0, window: int = 16, pages: int = 9, slots: int = 5) -> CacheGeometry:
    """All kinds of component with small rows: 2 CSA layers, 1 HCA layer, 4 in all."""
    specs = (
        ComponentSpec("c4_kv", Scope.PAGE, 4, (1, 3), 6, "bfloat16"),
        ComponentSpec("c4_index", Scope.PAGE, 4, (1, 3), 4, "bfloat16"),
        ComponentSpec("c128_kv", Scope.PAGE, 128, (2,), 6, "bfloat16"),
        ComponentSpec("swa", Scope.SLOT, 1, (0, 1, 2, 3), 6, "bfloat16", window + k),
        ComponentSpec("c4_state_a", Scope.SLOT, 1, (1, 3), 12, "float32", 8 + k),
        ComponentSpec("c4_state_b", Scope.SLOT, 1, (1, 3), 12, "float32", 8 + k),
        ComponentSpec("c4_index_state_a", Scope.SLOT, 1, (1, 3), 8, "float32", 8 + k),
        ComponentSpec("c4_index_state_b", Scope.SLOT, 1, (1, 3), 8, "float32", 8 + k),
        ComponentSpec("c128_state", Scope.SLOT, 1, (2,), 12, "float32", 128 + k),
        handoff_spec(2, 8, "bfloat16"),
    )
    return CacheGeometry(256, pages, slots, window, k, specs)
