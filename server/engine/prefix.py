"""What the engine does for the prefix cache: it takes over a hit once it is proven, and digests what is complete."""

from __future__ import annotations

from server.cache.digest import StateDigests
from server.cache.layout import Placement
from server.cache.prefix import PrefixHit
from server.cache.snapshots import SnapshotPoint
from server.cache.specs import LayoutError, Scope
from server.engine.events import Prefill
from server.engine.runner import ModelRunner
from server.failure import Failure
from server.model.batch import Segment

SLICE_NBYTES = 64 << 20
"""Of a hit so much is digested in one step, so that the other requests go on."""


class HitDamaged(Exception):
    """What the cache gave is not what was put there: ``page`` of the prompt, or (None) the snapshot."""

    def __init__(self, reason: str, page: int | None) -> None:
        super().__init__(reason)
        self.page = page

    @property
    def failure(self) -> Failure:
        return Failure("prefix_damaged", str(self), check="hit")


class TakeOver:
    """The first tokens of a prompt, out of the cache: proven slice by slice, and then restored.

    The pages are in the prompt's placement already. Their digests are those of the prompt, too, so they are taken even
    of a hit that is not compared.
    """

    def __init__(self, command: Prefill, hit: PrefixHit, digests: StateDigests, runner: ModelRunner) -> None:
        self._command, self._hit, self._digests, self._runner = command, hit, digests, runner
        layout = runner.arena.layout
        self._page_size = layout.page_size
        paged = (c for c in layout.components if c.scope is Scope.PAGE)
        self._slice = max(1, SLICE_NBYTES // max(1, sum(c.rows * c.row_nbytes for c in paged)))
        """Pages."""
        self.pages: list[bytes] = []
        """The page digests that are taken."""

    @property
    def n(self) -> int:
        """Tokens that need not be computed."""
        return self._hit.n

    def step(self) -> bool:
        """Proves the next slice. True: the hit is proven, and the slot is that of its end.

        Raises :class:`HitDamaged` before anything is written.
        """
        first, n_pages = len(self.pages), self.n // self._page_size
        if self._command.hit_is_checked and not first:
            self._check_snapshot()
        stop = min(n_pages, first + self._slice)
        self.pages += self._digests.take_pages(stop * self._page_size)
        if self._command.hit_is_checked:
            for number, page in enumerate(self._hit.pages[first:stop], first):
                if self.pages[number] != page.digest:
                    raise HitDamaged(f"page {number} of the prefix is not as it was when it was completed", number)
        if stop < n_pages:
            return False
        self._restore()
        return True

    def _check_snapshot(self) -> None:
        hit = self._hit
        end = SnapshotPoint(len(hit.pages) * self._page_size, hit.pages[-1].key)
        if (damage := hit.snapshot.damage(hit.point) or hit.snapshot.damage(end)) is not None:
            raise HitDamaged(damage, None)

    def _restore(self) -> None:
        """Writes the slot's rows, and the draft's of position n - 1, which depends on the prompt's token n."""
        placement = self._command.placement
        try:
            streams = self._runner.restore_snapshot(placement, self._hit.snapshot)
        except LayoutError as error:
            raise HitDamaged(str(error), None) from error
        if self._runner.drafts:
            segment = Segment([self._command.request.prompt_ids[self.n]], self.n - 1, placement)
            self._runner.draft_rows([segment], streams[None])
            self._runner.mark().wait()


class CompletedPages:
    """The pages of a request, whose prompt of ``n`` tokens is computed, that decoding completes."""

    def __init__(self, runner: ModelRunner, placement: Placement, n: int) -> None:
        self._runner, self._placement = runner, placement
        self._page_size = runner.arena.layout.page_size
        self._first = n // self._page_size
        self.digests: list[bytes] = []
        """Page by page, from the prompt's last incomplete one on."""

    def take(self, n_computed: int) -> None:
        """Digests what is complete now that ``n_computed`` positions are, without drafts that were rejected."""
        done, stop = self._first + len(self.digests), n_computed // self._page_size
        if done < stop:
            self.digests += self._runner.page_digests(self._placement, done, stop)
