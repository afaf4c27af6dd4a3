"""Chooses tokens from logits. What a row gets depends on its own logits, parameters, seed and position alone."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from server.engine.request import SamplingParams, TokenLogprob

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would leave nothing but ties."""
CHOOSE = "choose"
"""The purpose of the draw that chooses a token; other purposes get independent numbers at the same position."""
FIRST_RANKED = 512
_MASK64 = (1 << 64) - 1

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class NonFiniteLogits(Exception):
    """Rows whose best logit is NaN or infinite: the model's state is broken there. ``rows`` are their indices."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(
            f"Logits of rows {list(rows)} have no finite maximum: the state they were computed from is bad."
        )
        self.rows = rows


@dataclass(frozen=True)
class RowSampling:
    """How one row is sampled. ``position`` is the sequence position of the token to be chosen (n for the first after n
    prompt tokens). ``banned`` ids are never chosen; log probabilities do not know of the ban."""

    params: SamplingParams
    seed: int
    position: int
    banned: frozenset[int] = frozenset()


def sample(logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[TokenLogprob]:
    """Chooses one token for every row of ``logits`` [R, V] (any float dtype, any device).

    Greedy rows take the best logit, of equal ones the lowest id. Others draw by temperature, then top-k, then top-p, by
    inverse CDF over the float64 probabilities in descending order (equal ones by id). Log probabilities are those of
    the raw fp32 logits, computed in float64. A row that asks for none reports 0.0.

    :raises NonFiniteLogits: names every row with a NaN, or with no finite logit left.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits but {len(rows)} rows of sampling parameters.")
    if not rows:
        return []
    logits = logits.detach()
    best, best_ids = _without_banned(logits, rows).max(dim=-1)
    bad = (~torch.isfinite(best)).nonzero().flatten().tolist()
    if bad:
        raise NonFiniteLogits(tuple(bad))
    tokens = best_ids.tolist()
    outputs = []
    for i, row in enumerate(rows):
        greedy = row.params.temperature < GREEDY_BELOW
        if greedy and row.params.logprobs is None:
            outputs.append(TokenLogprob(tokens[i], 0.0))
            continue
        values: Floats = logits[i].to(device="cpu", dtype=torch.float32).numpy().astype(np.float64)
        token_id = tokens[i] if greedy else _draw_token(values, row)
        outputs.append(_report(values, token_id, row.params.logprobs))
    return outputs


def uniform(seed: int, position: int, purpose: str = CHOOSE) -> float:
    """A number in [0, 1) that is a pure function of its arguments (the top 53 bits of an xxh3_64)."""
    key = struct.pack("<QQ", seed & _MASK64, position) + purpose.encode()
    return float(xxhash.xxh3_64_intdigest(key) >> 11) * 2.0**-53


def _without_banned(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    if not any(row.banned for row in rows):
        return logits
    logits = logits.clone()
    for i, row in enumerate(rows):
        if row.banned:
            logits[i, _banned_in(row, logits.shape[1])] = -torch.inf
    return logits


def _banned_in(row: RowSampling, vocab_size: int) -> list[int]:
    return sorted(token_id for token_id in row.banned if 0 <= token_id < vocab_size)


def _draw_token(values: Floats, row: RowSampling) -> int:
    """Inverse CDF at this row's uniform number. ``values`` [V] are the raw logits."""
    if row.banned:
        values = values.copy()
        values[_banned_in(row, len(values))] = -np.inf
    with np.errstate(over="ignore"):
        weights: Floats = np.exp((values - values.max()) / row.params.temperature)
    u = uniform(row.seed, row.position)
    top_k = min(row.params.top_k, len(weights)) if row.params.top_k > 0 else None
    total = None if top_k else float(weights.sum())
    for ids in _ranked_prefixes(weights, top_k):
        complete = len(ids) == (top_k or len(weights))
        cumulative: Floats = np.cumsum(weights[ids])
        mass = float(cumulative[-1]) if total is None else total
        if row.params.top_p < 1.0:
            within = int(np.searchsorted(cumulative, row.params.top_p * mass, side="left"))
            if within == len(ids) and not complete:
                continue
            mass = float(cumulative[min(within, len(ids) - 1)])
        chosen = int(np.searchsorted(cumulative, u * mass, side="right"))
        if chosen < len(ids):
            return int(ids[chosen])
        if complete:  # u * mass was rounded up to all there is
            return int(ids[np.count_nonzero(weights[ids]) - 1])
    raise AssertionError("The last prefix is complete.")


def _ranked_prefixes(weights: Floats, top_k: int | None) -> Iterator[Ids]:
    """The best ids, best first: with ``top_k`` just those, else a short prefix and then all of them.

    Nearly every draw ends in the short prefix, and sorting a whole vocabulary costs more than a decode step.
    """
    if top_k:
        yield ranked(weights, top_k)
        return
    if len(weights) > 4 * FIRST_RANKED:
        yield ranked(weights, FIRST_RANKED)
    yield ranked(weights, len(weights))


def ranked(values: Floats, count: int) -> Ids:
    """Ids of the ``count`` largest ``values`` [V], largest first, equal ones by ascending id."""
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= threshold)
    else:
        ids = np.arange(len(values))
    order = np.argsort(-values[ids], kind="stable")
    return ids[order][:count]


def _report(values: Floats, token_id: int, n_top: int | None) -> TokenLogprob:
    """The chosen token's log probability under the raw logits [V], and the ``n_top`` best (none wanted: 0.0)."""
    if n_top is None:
        return TokenLogprob(token_id, 0.0)
    peak = values.max()
    logprobs: Floats = values - (peak + np.log(np.exp(values - peak).sum()))
    top = tuple((int(i), float(logprobs[i])) for i in ranked(logprobs, n_top)) if n_top else ()
    return TokenLogprob(token_id, float(logprobs[token_id]), top)
