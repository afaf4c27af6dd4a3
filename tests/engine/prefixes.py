"""An engine with a prefix cache, driven as the two nodes drive it, and all that can be seen of one request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from server.cache.allocator import Allocator
from server.cache.digest import StateParts
from server.cache.layout import Placement
from server.cache.owners import Owner
from server.cache.prefix import PrefixCache, PrefixHit, PromptKeys
from server.cache.snapshots import Snapshot, SnapshotPoint
from server.cache.specs import CacheGeometry
from server.engine.events import (
    ChunkComputed,
    ComputeFailed,
    Event,
    Finished,
    HitRefused,
    Output,
    Prefill,
    PrefillFinished,
    Resume,
    SnapshotTaken,
)
from server.engine.request import GenerationRequest, SamplingParams, TokenLogprob, TokenOutput
from server.model.state import state_components
from tests.engine.harness import TIMEOUT_S, Harness

PAGE = 256


@dataclass(frozen=True)
class Computed:
    """One request from its prompt to its answer. ``live`` are the bytes of every component's live rows at the prompt's
    end; ``pages`` the digests of complete pages, those of the answer too.
    """

    first: TokenLogprob
    parts: StateParts
    live: Mapping[str, bytes]
    outputs: Sequence[TokenOutput]
    tokens: tuple[int, ...]
    pages: tuple[bytes, ...]


class Reusing:
    """``harness`` with an allocator and a cache of its memory."""

    def __init__(self, harness: Harness, k: int = 0) -> None:
        self.harness, layout, model = harness, harness.arena.layout, harness.runner.model
        dtype = str(model.dtype).removeprefix("torch.")
        components = state_components(model.config, dtype, k, draft=model.drafts)
        items = {component.scope.value: component.items for component in layout.components}
        geometry = CacheGeometry(PAGE, items["page"], items["slot"], layout.window, k, components)
        self.allocator = Allocator(geometry, permute_seed=3, on_free=harness.arena.scrub)
        self.cache = PrefixCache(self.allocator, harness.arena.owners, ["model"], PAGE, snapshot_nbytes=1 << 30)
        self._rooms = count(1)

    def hit(self, ids: Sequence[int]) -> PrefixHit | None:
        return self.cache.hit(self.cache.keys_of(ids))

    def points(self, ids: Sequence[int], at: Sequence[int]) -> tuple[SnapshotPoint, ...]:
        keys = self.cache.keys_of(ids)
        return tuple(SnapshotPoint(n, keys.keys[n // PAGE - 1]) for n in at)

    def reserve(self, n_tokens: int, hit: PrefixHit | None = None) -> tuple[Owner, Placement]:
        owner = Owner(next(self._rooms), 1)
        placement = self.allocator.reserve(owner, n_tokens, shared=[page.page for page in hit.pages] if hit else [])
        assert placement is not None
        self.harness.arena.owners.stamp(placement, owner)
        return owner, placement

    def release(self, owner: Owner) -> None:
        self.harness.arena.owners.clear(self.allocator.placement_of(owner), owner)
        self.allocator.release(owner)

    def command(
        self, ids: Sequence[int], hit: PrefixHit | None, *, at: Sequence[int] = (), max_tokens: int = 10
    ) -> Prefill:
        """A prompt in memory of its own; snapshots are wanted ``at`` these boundaries. Its room and epoch, which are in
        the hand-off row, are always the same.
        """
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, logprobs=3)
        owner, placement = self.reserve(len(ids) + max_tokens + 8, hit)
        request = GenerationRequest(f"{owner}", tuple(ids), sampling)
        return Prefill(owner, request, placement, 7, 1, owner, hit, self.points(ids, at))

    def events(self, command: Prefill) -> list[Event]:
        """Every event of a prompt."""
        self.harness.engine.submit(command)
        return self.until_over(command)

    def until_over(self, command: Prefill) -> list[Event]:
        seen: list[Event] = []
        while not (seen and isinstance(seen[-1], PrefillFinished | HitRefused | ComputeFailed | Finished)):
            event = self.harness.events.get(timeout=TIMEOUT_S)
            if getattr(event, "key", None) == command.key:
                seen.append(event)
        return seen

    def compute(self, command: Prefill) -> Computed:
        """The whole request."""
        events = self.events(command)
        done = events[-1]
        assert isinstance(done, PrefillFinished), done
        n, arena = len(command.request.prompt_ids), self.harness.arena
        live = {name: arena.read(runs) for name, runs in arena.layout.live_runs(n, command.placement).items()}
        placement = replace(command.placement, read_only=n // PAGE)
        self.harness.engine.submit(Resume(command.key, command.request, placement, done.first, command.owner))
        answer = self.harness.until(Finished, command.key)
        end = answer[-1]
        assert isinstance(end, Finished)
        outputs = [event.output for event in answer if isinstance(event, Output)]
        return Computed(done.first, done.parts, live, outputs, end.tokens, page_digests(events) + end.pages)

    def keep(self, command: Prefill, events: Sequence[Event]) -> PromptKeys:
        """Gives the cache what a prompt's events bring, in their order, and ends the request."""
        keys, index = self.cache.keys_of(command.request.prompt_ids), 0
        owner = command.owner
        assert owner is not None
        for event in events:
            if isinstance(event, ChunkComputed | PrefillFinished):
                for digest in event.pages:
                    self.cache.keep_page(owner, owner, keys, index, digest)
                    index += 1
            elif isinstance(event, SnapshotTaken):
                assert self.cache.keep_snapshot(event.snapshot, keys)
        self.release(owner)
        return keys

    def seed(self, ids: Sequence[int], at: Sequence[int]) -> list[Snapshot]:
        """Computes a prompt whose pages and snapshots the cache gets."""
        command = self.command(ids, None, at=at)
        events = self.events(command)
        assert isinstance(events[-1], PrefillFinished), events[-1]
        self.keep(command, events)
        return [event.snapshot for event in events if isinstance(event, SnapshotTaken)]


def page_digests(events: Sequence[Event]) -> tuple[bytes, ...]:
    """Those of a prompt's complete pages."""
    return tuple(page for event in events if isinstance(event, ChunkComputed | PrefillFinished) for page in event.pages)
