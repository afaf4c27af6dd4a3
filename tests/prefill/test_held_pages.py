"""What a decode node has is not sent: pages are held by the digest of the bytes here, and by nothing else."""

from __future__ import annotations

import pytest

from server.prefill import held_pages
from server.prefill.held_pages import HeldPages
from server.prefill.request import Outgoing
from server.transfer.checks import Check
from tests.prefill.test_request import outgoing
from tests.transfer.support import PAGE_SIZE


def digests(text: str) -> list[bytes]:
    return [letter.encode() * 8 for letter in text]


def held(offered: str, *computed: str) -> HeldPages:
    pages = HeldPages(b"".join(digests(offered)))
    for part in computed:
        pages.compare(digests(part))
    return pages


def test_equal_pages_are_held_also_in_the_middle() -> None:
    pages = held("abcde", "axcxe", "fg")
    assert pages.spans == ((0, 1), (2, 3), (4, 5))
    assert [page in pages for page in range(7)] == [True, False, True, False, True, False, False]


def test_a_page_counts_by_its_place() -> None:
    assert held("ab", "ba").spans == ()


def test_spans_grow_from_report_to_report() -> None:
    assert held("abcd", "ab", "cx").spans == ((0, 3),)


def test_what_is_not_digested_yet_is_not_known() -> None:
    pages = held("abc", "a")
    assert (pages.are_known, pages.n_known(5)) == (False, 1)
    pages.compare(digests("bc"))
    assert (pages.are_known, pages.n_known(5)) == (True, 5)
    assert held("").n_known(5) == 5, "nothing is offered"


def test_more_spans_than_the_wire_carries_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_pages, "MAX_HELD_SPANS", 2)
    pages = held("abcdefgh", "axcxefxh")
    assert pages.spans == ((0, 1), (2, 3))
    assert 4 not in pages


def test_without_the_check_all_that_is_offered_is_held() -> None:
    pages = HeldPages(b"".join(digests("abc")), is_trusting=True)
    assert (pages.are_known, pages.spans) == (True, ((0, 3),))
    pages.compare(digests("xyzab"))
    assert pages.spans == ((0, 3),)


def sender(n_pages: int, offered: str, *skipped: Check) -> Outgoing:
    return outgoing(n_pages * PAGE_SIZE + 7, b"".join(digests(offered)), frozenset(skipped))


def pages_of(out: Outgoing, n_computed: int) -> tuple[int, int]:
    """Bytes that go, and bytes that are held, of the pages that are complete."""
    batch = out.push_pages(n_computed * PAGE_SIZE, 1.0)
    if batch is None:
        return 0, 0
    n_sent = 0 if batch.job is None else sum(piece.nbytes for piece in batch.job.pieces)
    assert n_sent == sum(rows.nbytes for rows in batch.event.rows)
    return n_sent, sum(rows.held_nbytes for rows in batch.event.rows)


def test_offered_pages_go_when_their_digests_are_known_and_others_at_once() -> None:
    page = pages_of(sender(1, ""), 1)[0]
    out = sender(4, "ab")
    assert pages_of(out, 3) == (0, 0)
    out.pages_complete(digests("a"))
    assert pages_of(out, 3) == (0, page)
    out.pages_complete(digests("x"))
    assert pages_of(out, 3) == (2 * page, 0)
    assert pages_of(out, 4) == (page, 0)


def test_the_last_batch_holds_what_was_not_looked_at_before() -> None:
    out = sender(3, "abc")
    out.plan_ahead()
    out.pages_complete(digests("axc"))
    event = out.push_tail(1.0).event
    assert event.held == ((0, 1), (2, 3))
    c4_kv = next(rows for rows in event.rows if rows.component == "c4_kv")
    assert c4_kv.held_nbytes == 2 * (c4_kv.nbytes + c4_kv.held_nbytes) * 64 // (3 * 64 + 1)


def test_pages_without_a_digest_are_sent_in_the_end() -> None:
    event = sender(2, "ab").push_tail(1.0).event
    assert event.held == ()
    assert not any(rows.held_nbytes for rows in event.rows)


def test_without_the_check_nothing_is_compared() -> None:
    page = pages_of(sender(1, ""), 1)[0]
    assert pages_of(sender(2, "ab", Check.OFFER), 2) == (0, 2 * page)
