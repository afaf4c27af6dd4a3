"""Computing prompts chunk by chunk, with the draft's rows, and what a prefill node is told of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import accumulate

import torch

from server.cache.device import Mark
from server.cache.live import LIVE_RULES
from server.engine.events import ChunkComputed, Event, Prefill, PrefillFinished, Resume, SnapshotTaken
from server.engine.request import TokenLogprob
from server.engine.runner import ModelRunner
from server.engine.scheduler import Chunk, Sequence
from server.model.batch import Segment
from server.model.interface import BadStep, ForwardOutput


def prompt_forward(runner: ModelRunner, chunks: list[Chunk]) -> tuple[float, ForwardOutput, Mark]:
    """When it began, the target's output over the chunks, and the mark behind all that was computed: also the
    draft's window rows that will be read, of position t with the prompt's token t + 1.
    """
    started = time.perf_counter()
    output = runner.forward(
        [chunk.sequence.segment(chunk.n_tokens) for chunk in chunks],
        with_hidden=any(chunk.sequence.n_top is not None for chunk in chunks),
    )
    if runner.drafts:
        _draft_rows(runner, chunks, output)
    return started, output, runner.mark()


def _draft_rows(runner: ModelRunner, chunks: list[Chunk], output: ForwardOutput) -> None:
    """Writes the rows that are live where a snapshot is taken next, or at the prompt's end."""
    segments, streams = [], []
    ends = accumulate((chunk.n_tokens for chunk in chunks), initial=0)
    for chunk, row in zip(chunks, ends, strict=False):
        sequence = chunk.sequence
        first, stop = sequence.n_computed, sequence.n_computed + chunk.n_tokens
        live = LIVE_RULES["draft_swa"](sequence.end_from(stop), runner.arena.layout.window)
        part = range(max(first, live.start), min(stop, sequence.n_prompt - 1))  # behind the last there is no token
        if part:
            segments.append(Segment(sequence.tokens[part.start + 1 : part.stop + 1], part.start, sequence.placement))
            streams.append(output.streams[row + part.start - first : row + part.stop - first])
    if segments:
        try:
            runner.draft_rows(segments, torch.cat(streams))
        except BadStep as error:  # as any other: the target's rows are written
            raise RuntimeError(f"the draft's rows: {error}") from error


def report_chunk(runner: ModelRunner, sequence: Sequence, command: Prefill, streams: torch.Tensor) -> Iterator[Event]:
    """The events after a chunk, of whose last position the ``streams`` are ``[N, D]``: pages that are complete, and
    the snapshot if one is wanted here.

    Raises :class:`.WrongOwner`: a snapshot is read longer than its room lives, so the stamps are looked at first.
    """
    yield ChunkComputed(sequence.key, sequence.n_computed, _complete_pages(sequence))
    if (point := sequence.snapshots_at.get(sequence.n_computed)) is not None:
        check_owner(runner, command)
        yield SnapshotTaken(sequence.key, runner.take_snapshot(sequence.placement, point, streams))


def hand_over(
    runner: ModelRunner, sequence: Sequence, command: Prefill, first: TokenLogprob, streams: torch.Tensor
) -> Iterator[Event]:
    """The events at the end of a prompt on a prefill node, whose next token is ``first``."""
    check_owner(runner, command)
    if sequence.n_prompt in sequence.snapshots_at:
        yield from report_chunk(runner, sequence, command, streams)
    started = time.perf_counter()
    if sequence.digests is None:
        raise RuntimeError(f"{sequence.key} has no digests")
    pages = _complete_pages(sequence)
    prompt, placement = sequence.request.prompt_ids, sequence.placement
    parts = runner.hand_over(command.room, command.epoch, prompt, placement, first, streams, sequence.digests)
    digest_s = time.perf_counter() - started
    yield PrefillFinished(sequence.key, first, parts, sequence.prefill_s, digest_s, pages)


def check_owner(runner: ModelRunner, command: Prefill | Resume) -> None:
    """That the memory of the prompt's state is stamped as the command says. Raises :class:`.WrongOwner`."""
    if command.owner is not None:
        runner.check_owner(command.owner, len(command.request.prompt_ids), command.placement)


def _complete_pages(sequence: Sequence) -> tuple[bytes, ...]:
    """The digests of the pages that were completed since they were asked for last."""
    return () if sequence.digests is None else sequence.digests.take_pages(sequence.n_computed)
