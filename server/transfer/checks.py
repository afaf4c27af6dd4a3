"""The proofs that a room's state must pass, by name: in failures, in metrics, and to switch one off on purpose."""

from __future__ import annotations

import enum


class Check(enum.StrEnum):
    """One proof. All of them are made for every room, unless one is switched off on purpose."""

    STAMP = "stamp"
    """Every slot and page that rows are read from is stamped with this room (both nodes)."""
    COVERAGE = "coverage"
    """``Done`` claims exactly the live rows of every component (decode node)."""
    BYTES = "bytes"
    """``Done`` claims the right number of bytes of every component (decode node)."""
    DIGEST = "digest"
    """The bytes in the decode node's memory are those the prefill node computed (decode node)."""
    HANDOFF = "handoff"
    """The hand-off row is of this room, epoch, prompt length and prompt (decode node)."""
    HIT = "hit"
    """The pages and the snapshot that a prompt is computed on from are those that were put into the cache (prefill
    node).
    """
    OFFER = "offer"
    """Of the pages that the decode node offers those are held whose bytes are the prefill node's own (prefill node)."""


PLACEMENT = "placement"
"""Not a check of its own: the copy plan takes no slot or page that cannot hold a request (item 0, one twice)."""
