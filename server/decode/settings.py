"""How a decode node is set up."""

from __future__ import annotations

from dataclasses import dataclass

from server.cache.specs import DRAFT
from server.node.context import NodeSettings


@dataclass(frozen=True, kw_only=True)
class DecodeSettings(NodeSettings):
    """``prefill`` are the prefill nodes' ``host:bootstrap_port``; None computes prompts here (``--local-prefill``).

    ``own_components`` are filled here and not asked of the peers. Raises :class:`ValueError` for an empty ``prefill``.
    """

    prefill: tuple[str, ...] | None
    own_components: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.prefill is not None and not self.prefill:
            raise ValueError("a decode node needs at least one prefill node, or local prefill")

    @property
    def draft_state(self) -> str | None:
        """Where the draft's window of a prompt comes from; None without speculation."""
        if not self.spec_tokens:
            return None
        if self.prefill is None:
            return "local"
        return "recompute" if DRAFT in self.own_components else "transfer"
