"""A room's memory on the prefill node: granted, stamped, planned from, and given back."""

from __future__ import annotations

from server.cache.allocator import ItemState
from server.cache.layout import Placement
from server.cache.owners import WrongOwner
from server.cache.specs import LayoutError
from server.engine.events import Prefill
from server.engine.prompt_logprobs import over_limit
from server.engine.request import GenerationRequest
from server.failure import Failure, internal_error
from server.node.context import NodeContext, NodeSettings
from server.prefill.decode_peer import DecodePeer
from server.prefill.request import Outgoing, PrefillRequest
from server.transfer.checks import PLACEMENT, Check
from server.transfer.plan import Side, check_holds
from server.transfer.protocol import Reserve


class RoomMemory:
    """Slots and pages of all rooms. Lives in the node's event loop."""

    def __init__(self, settings: NodeSettings, context: NodeContext) -> None:
        self._arena = context.arena
        self._allocator = context.allocator
        self._hooks = context.hooks
        self._max_tokens = min(settings.max_context, context.allocator.capacity_tokens)
        self._vocab_size = context.tokenizer.vocab_size

    def refuses(self, peer: DecodePeer, reserve: Reserve, request: GenerationRequest, n: int) -> Failure | None:
        """Why no memory of this node, or of ``peer``, will ever hold ``reserve`` with its ``n`` tokens, or None."""
        prompt = request.prompt_ids or (0,)  # one that comes over HTTP was checked there
        if not 0 <= min(prompt) <= max(prompt) < self._vocab_size:
            return Failure("bad_token", f"a prompt token is not in the vocabulary of {self._vocab_size}")
        if n > self._max_tokens:
            reason = f"the prompt has {n} tokens, the prefill node computes at most {self._max_tokens}"
            return Failure("context_length_exceeded", reason)
        if (too_much := over_limit(n, request.sampling.prompt_logprobs)) is not None:
            return Failure("bad_sampling", too_much)
        try:
            check_holds(Side(peer.layout, Placement(reserve.slot, reserve.pages)), n, reserve.components)
            for name in reserve.components:
                self._arena.layout.component(name)
        except LayoutError as error:
            return Failure("bad_reserve", str(error))
        return None

    def grant(self, req: PrefillRequest) -> bool:
        """Gives a room a slot and pages, stamped as its own; False if they are not free now."""
        key = req.key
        placement = self._allocator.reserve(key, req.n_tokens)
        if placement is None:
            return False
        req.placement = placement
        req.record.placed(placement.slot, len(placement.pages))
        self._arena.owners.stamp(placement, key.owner)
        return True

    def prepare(self, req: PrefillRequest) -> Prefill:
        """Plans how the room's state will go to its decode node; the command that has it computed.

        Raises :class:`LayoutError`, or :class:`WrongOwner` for memory that is stamped as another's.
        """
        if req.placement is None:
            raise RuntimeError(f"{req.key} has no memory")
        key, reserve, n = req.key, req.room.reserve, req.n_tokens
        sending = self._hooks.sending(key, n, req.placement)
        owner = None if Check.STAMP in sending.skipped else key.owner
        if owner is not None:
            self._arena.owners.check(n, sending.source, reserve.components, owner)
        req.outgoing = Outgoing(self._arena, sending, req.peer, reserve, n)
        return Prefill(key, req.request, sending.source, key.room, key.epoch, owner)

    def give_back(self, req: PrefillRequest) -> None:
        """Nobody reads or writes there any more."""
        key = req.key
        if req.placement is not None:
            self._hooks.memory_free(key)
            self._arena.owners.clear(req.placement, key.owner)
        if self._allocator.state_of(key) is not ItemState.FREE:
            self._allocator.release(key)


def placement_failure(error: Exception) -> Failure:
    """Why :meth:`RoomMemory.prepare` raised: memory that is not the room's own or cannot hold it, or a mistake here."""
    if isinstance(error, WrongOwner):
        return error.failure
    if isinstance(error, LayoutError):
        return Failure("bad_placement", str(error), error.component, PLACEMENT)
    return internal_error("prefill", error)
