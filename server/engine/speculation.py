"""Speculative decoding: what a request remembers between steps, the draft chain, and which drafted tokens stand.

A drafted token stands exactly if the target, choosing at that position with that position's own random number, chooses
the same token. So the output is that of plain decoding token for token, greedy or sampled, and its distribution is the
target's: this is rejection sampling against a draft that proposes one token with certainty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from server.cache.device import select_rows
from server.cache.layout import Placement
from server.engine.guide import Guide
from server.engine.request import SamplingParams, TokenLogprob
from server.engine.runner import ModelRunner
from server.engine.sampler import NonFiniteLogits, RowSampling, read_best, sample
from server.kernels.sampling import SampleKernel
from server.model.batch import Segment


@dataclass
class DraftState:
    """What the next draft chain starts from: the target's ``streams`` ``[m, N, D]`` of the last m computed positions.

    The draft's own rows of those positions are not written yet, or only from the draft's own streams. Rows before
    position ``valid_from`` were never computed: a cold start.
    """

    streams: torch.Tensor
    valid_from: int = 0

    @classmethod
    def after_prompt(cls, streams: torch.Tensor) -> DraftState:
        """Of a prompt's last position, whose ``streams`` are ``[N, D]``: a copy, for they may be a row of a whole
        chunk's, which would live as long.
        """
        return cls(streams[None].clone())


@dataclass(frozen=True)
class ChainStart:
    """One request of a chain: its draft state, the first of its positions, the tokens after each, and its placement.

    ``guide`` is its answer's place in a grammar, if it has one.
    """

    state: DraftState
    start: int
    next_ids: Sequence[int]
    placement: Placement
    n_draft: int
    guide: Guide | None = None


def propose(runner: ModelRunner, starts: Sequence[ChainStart], kernel: SampleKernel | None = None) -> list[list[int]]:
    """Up to ``n_draft`` greedy draft tokens for each request, batched step by step. A request with a grammar gets only
    such that fit it.

    The first step recomputes the rows of accepted positions from the target's streams; later steps feed the draft's
    own.

    :raises NonFiniteLogits: rows are indices into ``starts`` whose draft state cannot be computed on.
    """
    drafts: list[list[int]] = [[] for _ in starts]
    segments = [Segment(s.next_ids, s.start, s.placement, s.state.valid_from) for s in starts]
    streams = torch.cat([s.state.streams for s in starts])
    active = list(range(len(starts)))
    for start in starts:
        if start.guide is not None:
            start.guide.forget()
    while active:
        output = runner.draft(segments, streams)
        best_ids = read_best(output.logits)
        if bad := [i for i, token in zip(active, best_ids, strict=True) if token < 0]:
            raise NonFiniteLogits(tuple(bad))
        going = []
        for j, (i, token) in enumerate(zip(active, best_ids, strict=True)):
            may_go_on, guide = True, starts[i].guide
            if guide is not None:
                chosen = choose_guided(output.logits[j : j + 1], guide, kernel)
                if chosen is None:
                    continue  # if the target comes as far, its own row says what is wrong
                token = chosen
                may_go_on = guide.look_ahead(token)
            drafts[i].append(token)
            if may_go_on and len(drafts[i]) < starts[i].n_draft:
                going.append(j)
        streams = output.streams
        if len(going) < streams.shape[0]:  # else each row is the last of its segment
            ends = list(accumulate(len(s.token_ids) for s in segments))
            streams = select_rows(streams, [ends[j] - 1 for j in going])
        segments = [
            Segment([drafts[active[j]][-1]], segments[j].start + len(segments[j].token_ids), segments[j].placement,
                    segments[j].valid_from)
            for j in going
        ]  # fmt: skip
        active = [active[j] for j in going]
    return drafts


def choose_guided(logits: torch.Tensor, guide: Guide, kernel: SampleKernel | None) -> int | None:
    """The token with the largest of ``logits`` ``[1, V]`` among those that may come next; None if none may."""
    row = RowSampling(SamplingParams(), 0, 0, mask=guide.mask())
    try:
        [choice] = sample(logits, [row], kernel)
    except NonFiniteLogits as error:
        if not error.emptied:
            raise
        return None
    return choice.token_id


def accepted(choices: Sequence[TokenLogprob], draft: Sequence[int]) -> int:
    """How many drafted tokens stand. ``choices[i]`` is what the target chose after the first i of them (one more than
    ``draft``).
    """
    n = 0
    while n < len(draft) and choices[n].token_id == draft[n]:
        n += 1
    return n
