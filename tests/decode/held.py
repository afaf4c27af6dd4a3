"""What a prefill node claims in ``Done``, with any pages held."""

from __future__ import annotations

from server.cache.digest import PageRanges, StateParts
from server.cache.layout import ArenaLayout
from server.cache.live import live_positions
from server.transfer.protocol import Sent


def claims(layout: ArenaLayout, n: int, parts: StateParts, held: PageRanges = ()) -> tuple[Sent, ...]:
    """The truth about a prompt of ``n`` tokens, of which the pages ``held`` were not sent."""
    n_held = sum(stop - first for first, stop in held)
    found = []
    for name, rows in live_positions(n, layout.window, layout.names).items():
        c = layout.component(name)
        held_nbytes = n_held * c.rows * c.row_nbytes if name in parts.paged else 0
        digest, held_digest = parts.split(name, held)
        nbytes = len(rows) * c.row_nbytes - held_nbytes
        found.append(Sent(name, rows.start, rows.stop, nbytes, digest, held_nbytes, held_digest))
    return tuple(found)
