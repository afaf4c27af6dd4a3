"""Which pages need not go to a decode node because it has them: it offers their digests, and they are compared."""

from __future__ import annotations

from collections.abc import Sequence

from server.cache.digest import PageRanges
from server.transfer.protocol import MAX_HELD_SPANS

_DIGEST_NBYTES = 8


class HeldPages:
    """Which of the pages that a decode node ``offered``, by their digests, have the same bytes here: they are not sent.

    What is beyond :data:`MAX_HELD_SPANS` runs of pages is sent all the same. ``is_trusting``: nothing is compared, and
    everything that was offered is held.
    """

    def __init__(self, offered: bytes, *, is_trusting: bool = False) -> None:
        self._offered = offered
        self._n_judged = 0
        self._spans: list[tuple[int, int]] = []
        self._pages: set[int] = set()
        while is_trusting and not self.are_known:
            self._judge(is_held=True)

    def __contains__(self, page: object) -> bool:
        return page in self._pages

    @property
    def are_known(self) -> bool:
        """Whether it is decided about every page that was offered."""
        return self._n_judged * _DIGEST_NBYTES >= len(self._offered)

    @property
    def spans(self) -> PageRanges:
        return tuple(self._spans)

    def n_known(self, n_pages: int) -> int:
        """Of how many of the first ``n_pages`` it is known whether they are to be sent."""
        return n_pages if self.are_known else min(n_pages, self._n_judged)

    def compare(self, digests: Sequence[bytes]) -> None:
        """Takes the digests of the next complete pages here."""
        for digest in digests:
            if not self.are_known:
                start = self._n_judged * _DIGEST_NBYTES
                self._judge(is_held=digest == self._offered[start : start + _DIGEST_NBYTES])

    def _judge(self, *, is_held: bool) -> None:
        page = self._n_judged
        self._n_judged += 1
        if not is_held:
            return
        if self._spans and self._spans[-1][1] == page:
            self._spans[-1] = (self._spans[-1][0], page + 1)
        elif len(self._spans) < MAX_HELD_SPANS:
            self._spans.append((page, page + 1))
        else:
            return
        self._pages.add(page)
