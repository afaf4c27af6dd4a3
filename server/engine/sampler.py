"""Chooses tokens from logits. What a row gets depends on its own logits, parameters, seed and position alone.

The rule is in ``docs/sampling.md``. It has two forms, which choose the same tokens: numpy, here, and the kernels
(``server/kernels/src/sampler.cpp``).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from server.cache.device import to_host
from server.engine.edits import Reals, Table, apply, bans
from server.engine.request import SamplingParams, TokenLogprob
from server.kernels.sampling import ROW, SampleKernel, Words

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would leave nothing but ties."""
CHOOSE = "choose"
"""The purpose of the draw that chooses a token; other purposes get independent numbers at the same position."""
FIRST_RANKED = 512
BEST_WEIGHT = 1 << 30
DRAW_BITS = 53
_MASK64 = (1 << 64) - 1
_NOWHERE = _NOTHING = (0, 0, 0)
"""Addresses and lengths of the edits and the mask of a row that has none."""
_LOG2_E = 1.4426950408889634
_POWER_OF_TWO = tuple(
    np.float32(c)
    for c in (
        0.0013264735462144017,
        0.00967151764780283,
        0.05550733953714371,
        0.24022242426872253,
        0.6931470036506653,
        1,
    )
)
"""2**f for -0.5 <= f <= 0.5 within 1.6e-7, highest power first: the best polynomial of degree 5 that is 1 at 0."""

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]


class NonFiniteLogits(Exception):
    """Rows without a finite best logit; ``rows`` are their indices. Of those in ``emptied`` the edits and the mask left
    nothing: the request forbids every token. In the others a NaN or an infinity is: the model's state is broken there.
    """

    def __init__(self, rows: tuple[int, ...], emptied: frozenset[int] = frozenset()) -> None:
        super().__init__(
            f"Logits of rows {list(rows)} have no finite maximum: the state they were computed from is bad"
            + (f", but in {sorted(emptied)} the request itself forbids every token." if emptied else ".")
        )
        self.rows = rows
        self.emptied = emptied


@dataclass(frozen=True)
class RowSampling:
    """How one row is sampled. ``position`` is the sequence position of the token to be chosen (n for the first after n
    prompt tokens). ``banned`` ids are never chosen, nor those that ``mask`` does not let through. ``edits`` are
    the request's, ``own`` those of this row, which take their place. Log probabilities know of none of this.
    """

    params: SamplingParams
    seed: int
    position: int
    banned: frozenset[int] = frozenset()
    edits: Table | None = None
    own: Table | None = None
    mask: Words | None = None

    @property
    def is_greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def needs_logits(self) -> bool:
        """Whether more is asked of this row than its best token."""
        return not self.is_greedy or self.is_edited or self.params.logprobs is not None

    @property
    def is_edited(self) -> bool:
        return bool(self.banned) or self.edits is not None or self.own is not None or self.mask is not None

    def own_edits(self) -> Table | None:
        """The row's own edits with the bans among them, None if there are none."""
        if not self.banned:
            return self.own
        banned = bans(self.banned)
        if self.own is None:
            return banned
        return np.concatenate([self.own[~np.isin(self.own["token"], banned["token"])], banned])


def sample(logits: torch.Tensor, rows: Sequence[RowSampling], kernel: SampleKernel | None = None) -> list[TokenLogprob]:
    """Chooses one token for every row of ``logits`` [R, V] (any float dtype, any device) by the rule above, with
    ``kernel`` where there is one. A row that asks for no log probability reports 0.0.

    :raises NonFiniteLogits: names every row with a NaN, or with no finite logit left.
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits but {len(rows)} rows of sampling parameters.")
    if not rows:
        return []
    if not logits.is_cpu:
        if not any(row.needs_logits for row in rows):
            return _sample_best(logits)
        logits = to_host(logits.float())
    return _sample_in_kernel(logits, rows, kernel) if kernel else _sample_in_python(logits.detach(), rows)


def read_best(logits: torch.Tensor) -> list[int]:
    """The best token of every row of ``logits`` [R, V], the first among equals; -1 where it is not finite. What is
    read back from a GPU is one number a row.
    """
    best, ids = logits.max(dim=-1)
    token_ids: list[int] = to_host(ids.masked_fill(~best.isfinite(), -1)).tolist()
    return token_ids


def _sample_best(logits: torch.Tensor) -> list[TokenLogprob]:
    token_ids = read_best(logits)
    if bad := tuple(i for i, token_id in enumerate(token_ids) if token_id < 0):
        raise NonFiniteLogits(bad)
    return [TokenLogprob(token_id, 0.0) for token_id in token_ids]


def uniform(seed: int, position: int, purpose: str = CHOOSE) -> float:
    """A number in [0, 1) that is a pure function of its arguments."""
    return draw_bits(seed, position, purpose) * 2.0**-DRAW_BITS


def draw_bits(seed: int, position: int, purpose: str = CHOOSE) -> int:
    """:data:`DRAW_BITS` random bits that are a pure function of the arguments: the top ones of an xxh3_64."""
    key = struct.pack("<QQ", seed & _MASK64, position) + purpose.encode()
    return xxhash.xxh3_64_intdigest(key) >> (64 - DRAW_BITS)


def _scale(temperature: float) -> float:
    """What differences of logits are multiplied with. Rounded to fp32 by its users; never 0, never infinite."""
    return min(max(_LOG2_E / temperature, 1e-30), 1e30)


# --- with the kernels -------------------------------------------------------------------------------------------------


def _sample_in_kernel(logits: torch.Tensor, rows: Sequence[RowSampling], kernel: SampleKernel) -> list[TokenLogprob]:
    if logits.dtype != torch.float32 or not logits.is_cpu or logits.stride(1) != 1:
        logits = logits.to(device="cpu", dtype=torch.float32).contiguous()
    packed, alive, max_alternatives, vocab_size = [], [], 0, logits.shape[1]
    for row in rows:
        params, pointers, lengths = row.params, _NOWHERE, _NOTHING
        if row.is_edited:
            own = row.own_edits()
            alive.append(own)
            pointers = (_address(row.edits), _address(own), _address(row.mask))
            lengths = (_length(row.edits), _length(own), _length(row.mask))
        draw, scale = (0, 0.0) if row.is_greedy else (draw_bits(row.seed, row.position), _scale(params.temperature))
        n_top = -1 if params.logprobs is None else params.logprobs
        max_alternatives = max(max_alternatives, n_top)
        packed.append(
            ROW.pack(
                *pointers, draw, params.top_p, params.min_p, scale,
                params.repetition_penalty, params.presence_penalty, params.frequency_penalty,
                *lengths, min(params.top_k, vocab_size), n_top, 0,
            )
        )  # fmt: skip
    choices, tops = kernel(logits, packed, max_alternatives)
    if bad := tuple(i for i, (token_id, _) in enumerate(choices) if token_id < 0):
        raise NonFiniteLogits(bad, _emptied(logits, rows, bad))
    if not max_alternatives:
        return [TokenLogprob(token_id, logprob) for token_id, logprob in choices]
    return [
        TokenLogprob(token_id, logprob, tuple(top[: min(row.params.logprobs or 0, vocab_size)]))
        for (token_id, logprob), top, row in zip(choices, tops, rows, strict=True)
    ]


def _address(array: Table | Words | None) -> int:
    return 0 if array is None else array.ctypes.data


def _length(array: Table | Words | None) -> int:
    return 0 if array is None else len(array)


# --- in numpy ---------------------------------------------------------------------------------------------------------


def _sample_in_python(logits: torch.Tensor, rows: Sequence[RowSampling]) -> list[TokenLogprob]:
    edited = _edited(logits, rows)
    best, best_ids = edited.max(dim=-1)
    sound = torch.isfinite(best)
    for i, row in enumerate(rows):
        if row.params.logprobs is not None and edited is not logits:
            sound[i] &= torch.isfinite(logits[i].max())
    if bad := tuple((~sound).nonzero().flatten().tolist()):
        raise NonFiniteLogits(bad, _emptied(logits, rows, bad))
    tokens = best_ids.tolist()
    outputs = []
    for i, row in enumerate(rows):
        token_id = tokens[i] if row.is_greedy else _draw_token(_values(edited[i]), row)
        if row.params.logprobs is None:
            outputs.append(TokenLogprob(token_id, 0.0))
        else:
            outputs.append(_report(_values(logits[i]), token_id, row.params.logprobs))
    return outputs


def _values(logits: torch.Tensor) -> Reals:
    values: Reals = logits.to(device="cpu", dtype=torch.float32).numpy()
    return values


def _edited(logits: torch.Tensor, rows: Sequence[RowSampling]) -> torch.Tensor:
    """``logits`` themselves if no row has edits, else a copy in fp32."""
    if not any(row.is_edited for row in rows):
        return logits
    logits = logits.float().clone()
    for i, row in enumerate(rows):
        if row.is_edited:
            edited = apply(_values(logits[i]), row.params, (row.edits, row.own_edits()), row.mask)
            logits[i] = torch.from_numpy(edited).to(logits.device)
    return logits


def _emptied(logits: torch.Tensor, rows: Sequence[RowSampling], bad: Sequence[int]) -> frozenset[int]:
    """Of the rows that have no finite best those that had one before they were edited."""
    return frozenset(i for i in bad if rows[i].is_edited and math.isfinite(float(logits[i].max())))


def token_weights(values: Reals, temperature: float) -> Ids:
    """The weight of every token, 0 to :data:`BEST_WEIGHT`. ``values`` [V] are finite or -infinity."""
    with np.errstate(over="ignore"):
        x = np.maximum((values - values.max()) * np.float32(_scale(temperature)), np.float32(-32))
    n = np.rint(x)
    f = x - n
    power = np.full_like(f, _POWER_OF_TWO[0])
    for coefficient in _POWER_OF_TWO[1:]:
        power = power * f + coefficient
    weights: Ids = np.rint(np.ldexp(power, n.astype(np.int32) + 30)).astype(np.int64)
    return weights


def _draw_token(values: Reals, row: RowSampling) -> int:
    """``values`` [V] are the logits after the edits, with a finite best."""
    weights = token_weights(values, row.params.temperature)
    if row.params.min_p > 0:
        weights[weights < min(row.params.min_p, 1.0) * BEST_WEIGHT] = 0
    draw = draw_bits(row.seed, row.position)
    top_k = min(row.params.top_k, len(weights)) if row.params.top_k > 0 else None
    for ids in _ranked_prefixes(values, top_k):
        cumulative: Ids = np.cumsum(weights[ids])
        mass = int(cumulative[-1] if top_k else weights.sum())
        if row.params.top_p < 1.0:
            needed = min(max(1, math.ceil(row.params.top_p * mass)), mass)
            within = int(np.searchsorted(cumulative, needed, side="left"))
            if within == len(ids):
                continue  # the prefix was too short
            mass = int(cumulative[within])
        chosen = int(np.searchsorted(cumulative, draw * mass >> DRAW_BITS, side="right"))
        if chosen < len(ids):
            return int(ids[chosen])
    raise AssertionError("The last prefix is complete.")


def _ranked_prefixes(values: Reals, top_k: int | None) -> Iterator[Ids]:
    """The best ids, best first: with ``top_k`` just those, else a short prefix and then all of them.

    Nearly every draw ends in the short prefix, and sorting a whole vocabulary costs more than a decode step.
    """
    if top_k:
        yield ranked(values, top_k)
        return
    if len(values) > 4 * FIRST_RANKED:
        yield ranked(values, FIRST_RANKED)
    yield ranked(values, len(values))


def ranked(values: Reals | Floats, count: int) -> Ids:
    """Ids of the ``count`` largest ``values`` [V], largest first, equal ones by ascending id."""
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= threshold)
    else:
        ids = np.arange(len(values))
    order = np.argsort(-values[ids], kind="stable")
    return ids[order][:count]


def _report(logits: Reals, token_id: int, n_top: int) -> TokenLogprob:
    """The chosen token's log probability under the raw logits [V], and the ``n_top`` best."""
    values = logits.astype(np.float64)
    peak = values.max()
    logprobs: Floats = values - (peak + np.log(np.exp(values - peak).sum()))
    top = tuple((int(i), float(logprobs[i])) for i in ranked(logprobs, n_top)) if n_top else ()
    return TokenLogprob(token_id, float(logprobs[token_id]), top)
