"""Decode and prefill in this process: the engine against transformers, the Python model, and the memory's bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import truediv

from .local_engine import LocalEngine, kernels_can_be_chosen
from .measurement import BenchFailed, Measurement, Prompt, Stream, decode_rate, decoding_at_once
from .reference import Transformers
from .roofline import MemoryReader, state_nbytes, weight_nbytes
from .session import Pace, Session

ENGINE, PYTHON, TRANSFORMERS, ROOFLINE = "engine", "Python model", "transformers", "roofline"
SETTINGS = (("bundled", "float32"), ("medium", "float32"), ("medium", "bfloat16"))
PAGES, SLOTS = 512, 64
MOST_LONGER = 4
LEAST_SHARE_AT_ONCE = 0.25
"""Of an answer's tokens, those that are decoded while all requests decode: fewer would say little."""
TRANSFORMERS_PREFILL_MOST = 4096
"""Tokens: it keeps every score of a prompt's attention and index, gigabytes beyond this."""

TRIES = 3
PATIENCE = 2
"""Times --seconds for one prompt: a slow one is measured once rather than not at all."""

Decode = Callable[[Sequence[Prompt], int], list[Stream]]


@contextmanager
def running_engines(session: Session, checkpoint: str, dtype: str) -> Iterator[dict[str, LocalEngine]]:
    """The engine as a node runs it and, in fp32 and where kernels can be chosen, the one that runs the Python model."""
    path = session.checkpoints.path(checkpoint)
    both = kernels_can_be_chosen() and dtype == "float32"
    chosen = {ENGINE: None, PYTHON: "python"} if both else {ENGINE: None}
    engines: dict[str, LocalEngine] = {}
    try:
        for name, kernels in chosen.items():
            engines[name] = LocalEngine(
                path, threads=session.threads, dtype=dtype, kernels=kernels, pages=PAGES, slots=SLOTS
            )
        yield engines
    finally:
        for engine in engines.values():
            engine.close()


def tokens_of_each(variants: dict[str, Decode], prompts: Sequence[Prompt], round_s: float, most: int) -> dict[str, int]:
    """:func:`tokens_that_fit` of every variant. Raises :class:`BenchFailed`."""
    return {name: tokens_that_fit(decode, prompts, round_s, most) for name, decode in variants.items()}


def tokens_that_fit(decode: Decode, prompts: Sequence[Prompt], round_s: float, most: int) -> int:
    """How many tokens each request decodes in a round of about ``round_s``: 4 to ``most``, and more if only so all of
    them ever decode at once, up to ``MOST_LONGER`` times as many. Raises :class:`BenchFailed`.
    """
    n = 4
    while True:
        started = time.perf_counter()
        streams = decode(prompts, n)
        seconds = time.perf_counter() - started
        all_at_once = decoding_at_once(streams)[2] >= LEAST_SHARE_AT_ONCE * n * len(prompts)
        if all_at_once and (seconds >= round_s or n >= most):
            return n
        if n >= MOST_LONGER * most:
            raise BenchFailed(f"{len(prompts)} requests never decoded all at once, with {n} tokens each")
        n *= 2


def measure_decode(session: Session) -> Iterator[Measurement]:
    sizes = session.sizes
    for checkpoint, dtype in SETTINGS:
        reference = Transformers(session.checkpoints.path(checkpoint), dtype)
        with running_engines(session, checkpoint, dtype) as engines:
            variants: dict[str, Decode] = {TRANSFORMERS: reference.decode}
            variants |= {name: engine.decode for name, engine in engines.items()}
            for batch in sizes.batches:
                yield _measure_batch(session, checkpoint, dtype, batch, variants, engines[ENGINE])


def _measure_batch(
    session: Session, checkpoint: str, dtype: str, batch: int, variants: dict[str, Decode], engine: LocalEngine
) -> Measurement:
    sizes = session.sizes
    name = f"decode, {checkpoint} {dtype}, {requests(batch)}"
    session.on_step(name)
    prompts = session.prompts.for_decoding(batch, sizes)
    n_tokens = tokens_of_each(variants, prompts, sizes.round_s, sizes.most_decode_tokens)
    context = len(prompts[0]) + n_tokens[ENGINE] // 2
    state = state_nbytes(engine.model_config, engine.layout, context)
    nbytes = weight_nbytes(engine.model_config, dtype, batch) + batch * state
    reader = MemoryReader(nbytes)

    def one_round(m: Measurement) -> None:
        decode_round(variants, prompts, n_tokens, m)
        m.add(ROOFLINE, batch * reader.bytes_per_s() / nbytes)

    m = Measurement(
        "decode",
        name,
        "tokens/s",
        ((ENGINE, TRANSFORMERS), (ENGINE, PYTHON), (PYTHON, TRANSFORMERS), (ENGINE, ROOFLINE)),
        size={"checkpoint": checkpoint, "dtype": dtype, "requests": batch, "tokens": n_tokens}
        | {"prompt_tokens": len(prompts[0]), "step_nbytes": nbytes},
        details={"kernels": engine.kernels},
    )
    return session.measure(m, one_round)


def decode_round(
    variants: dict[str, Decode], prompts: Sequence[Prompt], n_tokens: dict[str, int], m: Measurement
) -> None:
    """The rate of every variant, in turn, with its own number of tokens: twice as many from now on where a round has
    shown that they are too few to decode all at once.
    """
    for name, decode in variants.items():
        for _ in range(TRIES):
            streams = decode(prompts, n_tokens[name])
            if decoding_at_once(streams)[2]:
                break
            n_tokens[name] *= 2
        m.add(name, decode_rate(streams))


def measure_prefill(session: Session) -> Iterator[Measurement]:
    for checkpoint, dtype in (*SETTINGS, ("flash", "float32")):
        with running_engines(session, checkpoint, dtype) as engines:
            prefills = {name: engine.prefill_s for name, engine in engines.items()}
            lengths = session.sizes.flash[:2]
            if checkpoint != "flash":
                lengths = session.sizes.prefill
                prefills[TRANSFORMERS] = Transformers(session.checkpoints.path(checkpoint), dtype).prefill_s
            pace = Pace(PATIENCE * session.sizes.seconds, {TRANSFORMERS: TRANSFORMERS_PREFILL_MOST})
            for n in lengths:
                m = Measurement(
                    "prefill",
                    f"prefill, {checkpoint} {dtype}, {n:,} tokens",
                    "tokens/s",
                    ((ENGINE, TRANSFORMERS), (ENGINE, PYTHON), (PYTHON, TRANSFORMERS)),
                    size={"checkpoint": checkpoint, "dtype": dtype, "tokens": n},
                )
                runs = {name: partial(prefill, session.prompts.one(n)) for name, prefill in prefills.items()}
                yield session.measure_prompts(m, runs, n, pace, partial(truediv, n))


def requests(n: int) -> str:
    return f"{n} request{'s' * (n > 1)}"
