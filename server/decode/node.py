"""The decode node: what happens to a request is in :mod:`.request_manager`, the process around it in
:mod:`server.node.base`.
"""

from __future__ import annotations

from typing import Any

from server.decode.request_manager import RequestManager
from server.decode.settings import DecodeSettings
from server.engine.generation import NodeGeneration
from server.engine.request import GenerationRequest
from server.node.base import BaseNode
from server.node.context import NodeContext


class DecodeNode(BaseNode):
    """Takes prompts' state from prefill nodes, or computes it here, and answers."""

    role = "decode"
    manager: RequestManager
    """The node's requests."""

    def __init__(self, settings: DecodeSettings, context: NodeContext) -> None:
        super().__init__(settings, context)
        self._settings = settings
        self.manager = RequestManager(settings, context, self.incarnation)

    async def _open(self) -> None:
        self.manager.start()
        self._supervisor.watch(lambda: self.manager.rooms.peers.tasks)

    async def _close(self) -> None:
        await self.manager.close()

    @property
    def busy(self) -> bool:
        """Whether a client still waits for an answer."""
        return any(not req.generation.ended for req in self.manager.reqs.values())

    def submit(self, request: GenerationRequest, *, room: int | None = None) -> NodeGeneration:
        """Admits a request; ``room`` None draws one.

        Raises :class:`RequestFailed` at once for what cannot be served.
        """
        return self.manager.submit(request, room=room)

    async def _ready(self) -> tuple[bool, str]:
        """With peers: whether a probe write by one of them really arrives."""
        return await self.manager.ready()

    def _counts(self) -> tuple[int, int]:
        return len(self.manager.reqs), len(self.manager.queue)

    def _role_state(self, now: float) -> dict[str, Any]:
        manager = self.manager
        return {"quarantine": manager.quarantine.describe(now), "accept_lengths": manager.outputs.accept_lengths()}

    def _info(self) -> dict[str, Any]:
        manager = self.manager
        return {
            "local_prefill": self._settings.prefill is None,
            "spec_tokens": self._settings.spec_tokens,
            "draft_state": self._settings.draft_state,
            "waiting": len(manager.queue),
            "quarantine": manager.quarantine.describe(self._context.clock()),
            "peers": manager.rooms.peers.describe(),
        }
