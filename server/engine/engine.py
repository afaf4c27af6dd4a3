"""The engine thread: takes commands, computes step after step, reports events. It alone touches model and pools."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from typing import TypeVar

import msgspec
import torch

from server.cache.device import select_rows
from server.engine.choosing import choose
from server.engine.events import (
    Begin,
    Cancel,
    ChunkComputed,
    Command,
    ComputeFailed,
    Died,
    Event,
    Finished,
    Generate,
    GrammarReady,
    HitRefused,
    Output,
    Prefill,
    Prepare,
    PromptScored,
    Resume,
    Scrub,
    Scrubbed,
    Stop,
)
from server.engine.failures import failure_of
from server.engine.prefix import CompletedPages, HitDamaged, TakeOver
from server.engine.preparation import Preparation, Prepared
from server.engine.prompts import check_owner, hand_over, prompt_forward, report_chunk
from server.engine.request import FinishReason, TokenizerLike, TokenLogprob, TokenOutput
from server.engine.runner import ModelRunner
from server.engine.scheduler import Chunk, Scheduler, Sequence
from server.engine.scoring import score_rows
from server.engine.speculation import ChainStart, DraftState, accepted, propose
from server.kernels.sampling import SampleKernel
from server.model.interface import BadStep, ForwardOutput

log = logging.getLogger(__name__)

T = TypeVar("T")
Item = TypeVar("Item", Sequence, Chunk)


class Engine(threading.Thread):
    """Continuous batching over one :class:`ModelRunner`.

    ``on_event`` is called in this thread for every event. ``chunk_tokens`` bounds the prompt tokens of one step,
    ``threads`` the CPU threads of one operation. Tokens are chosen by ``sample_kernel``, or in numpy without one, which
    gives the same ones. Commands may be submitted from any thread, or put into ``commands``. With ``digest_pages`` the
    end of a resumed request has the digests of the pages that it has completed.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: TokenizerLike,
        on_event: Callable[[Event], None],
        *,
        commands: queue.SimpleQueue[Command] | None = None,
        chunk_tokens: int = 256,
        threads: int = 1,
        spec_tokens: int = 0,
        cold_draft: bool = False,
        sample_kernel: SampleKernel | None = None,
        digest_pages: bool = False,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._runner, self._tokenizer, self._on_event, self._threads = runner, tokenizer, on_event, threads
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue() if commands is None else commands
        self._scheduler = Scheduler(chunk_tokens)
        self._spec_tokens, self._cold_draft, self._sample_kernel = spec_tokens, cold_draft, sample_kernel
        self._digests_pages = digest_pages
        self._preparation = Preparation(tokenizer, self._commands.put)
        self._stopping = False
        if spec_tokens:
            self._check_drafting(spec_tokens)

    def _check_drafting(self, spec_tokens: int) -> None:
        if not self._runner.drafts:
            raise ValueError(
                f"{spec_tokens} draft tokens a step need a model with its draft layer and a draft_swa component"
            )
        layout = self._runner.arena.layout
        if spec_tokens > (slack := layout.component("swa").rows - layout.window):
            raise ValueError(f"{spec_tokens} draft tokens a step cannot be undone: the rings have room for {slack}")

    def submit(self, command: Command) -> None:
        self._commands.put(command)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the thread after its current step. Raises :class:`TimeoutError` if it does not end in time."""
        self.submit(Stop())
        self.join(timeout_s)
        if self.is_alive():
            raise TimeoutError(f"the engine thread did not stop within {timeout_s} s")

    def run(self) -> None:
        self._runner.set_threads(self._threads)
        try:
            while not self._stopping:
                self._take_commands()
                if not self._stopping:
                    self._step()
        except Exception as error:
            log.exception("engine thread died")
            self._on_event(Died(f"{type(error).__name__}: {error}"))

    def _take_commands(self) -> None:
        """Takes everything that is queued; waits for the first if there is nothing to compute."""
        wait = self._scheduler.idle
        while not self._stopping:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            self._obey(command)

    def _obey(self, command: Command) -> None:
        match command:
            case Prefill() | Generate() | Resume():
                with self._failing(command):
                    self._begin(command)
            case GrammarReady(waiting):
                with self._failing(waiting):
                    if (prepared := self._preparation.grammar_ready(command)) is not None:
                        self._start(waiting, prepared)
            case Cancel(key):
                if (sequence := self._scheduler.remove(key)) is not None:
                    self._finish(sequence, FinishReason.ABORT)
                elif (begin := self._preparation.forget(key)) is not None:
                    self._finish(begin, FinishReason.ABORT)
            case Prepare(key, request):
                with contextlib.suppress(Exception):  # what is wrong with it shows when it begins
                    self._preparation.prepare(key, request)
            case Scrub(key):
                self._preparation.forget(key)
                self._runner.mark().wait()
                self._on_event(Scrubbed(key))
            case Stop():
                self._stopping = True

    def _begin(self, command: Begin) -> None:
        if (prepared := self._preparation.begin(command)) is not None:
            self._start(command, prepared)

    def _start(self, command: Begin, prepared: Prepared) -> None:
        sequence = Sequence(command, *prepared)
        if isinstance(command, Resume):
            self._resume(sequence, command)
            return
        if isinstance(command, Prefill):
            sequence.digests = self._runner.state_digests(sequence.n_prompt, sequence.placement)
            if command.hit is not None:
                if sequence.n_top is not None:
                    raise RuntimeError("a prompt whose tokens are scored is computed as a whole")
                sequence.take_over = TakeOver(command, command.hit, sequence.digests, self._runner)
        self._scheduler.add(sequence)

    def _resume(self, sequence: Sequence, command: Resume) -> None:
        """Decodes on from a prompt that another node computed; its first token may already be the last."""
        check_owner(self._runner, command)
        n = sequence.n_computed = sequence.n_prompt
        self._scheduler.add(sequence)
        if self._digests_pages:
            sequence.completed = CompletedPages(self._runner, sequence.placement, n)
        if self._spec_tokens:
            streams = self._runner.handed_streams(sequence.placement)
            sequence.draft = DraftState(streams[None], valid_from=n - 1 if self._cold_draft else 0)
        self._append(sequence, [command.first])

    def _step(self) -> None:
        """One token (or several, with drafts) for every running request, then the next piece of what the oldest prompt
        takes over from the cache, and the next chunks of the oldest prompts.
        """
        if running := self._scheduler.decoding():
            self._decode(running)
        if (sequence := self._scheduler.taking_over()) is not None:
            self._take_over(sequence)
        if chunks := self._scheduler.next_chunks():
            self._prefill(chunks)

    # --- decode -------------------------------------------------------------------------------------------------------

    def _decode(self, running: list[Sequence]) -> None:
        for batch, (drafts, output) in self._batches(running, self._draft_and_verify):
            chosen = choose(batch, drafts, output.logits, self._fail, self._sample_kernel)
            row = 0
            for sequence, draft, choices in zip(batch, drafts, chosen, strict=True):
                if choices is not None:
                    n = 1 + accepted(choices, draft[: len(choices) - 1])
                    sequence.n_computed += n
                    if sequence.draft is not None:
                        sequence.draft = DraftState(output.streams[row : row + n], sequence.draft.valid_from)
                    try:  # as self._failing, which costs as much as a token's text
                        if sequence.completed is not None:
                            sequence.completed.take(sequence.n_computed)
                        self._append(sequence, choices[:n], n_proposed=len(draft))
                    except Exception as error:  # noqa: BLE001  (logged with the failure)
                        self._fail(sequence, error)
                row += 1 + len(draft)

    def _draft_and_verify(self, running: list[Sequence]) -> tuple[list[list[int]], ForwardOutput]:
        """Drafts for each request (empty ones without speculation), and the target's forward over them."""
        drafts: list[list[int]] = [[] for _ in running]
        chains: dict[int, ChainStart] = {}
        if k := self._spec_tokens:
            chains = {i: start for i, s in enumerate(running) if (start := s.chain_start(k)) is not None}
        if chains:
            for i, draft in zip(chains, propose(self._runner, list(chains.values()), self._sample_kernel), strict=True):
                drafts[i] = draft
        segments = [sequence.verify_segment(draft) for sequence, draft in zip(running, drafts, strict=True)]
        return drafts, self._runner.forward(segments, every_row=True)

    # --- prefill ------------------------------------------------------------------------------------------------------

    def _take_over(self, sequence: Sequence) -> None:
        """The next piece of what a prompt takes over; behind the last one it is computed on."""
        if (take_over := sequence.take_over) is None:
            return
        started = time.perf_counter()
        with self._failing(sequence):
            try:
                is_done = take_over.step()
            except HitDamaged as damage:
                self._scheduler.remove(sequence.key)
                self._on_event(HitRefused(sequence.key, damage.failure, damage.page))
                return
            sequence.prefill_s += time.perf_counter() - started
            if is_done:
                sequence.take_over, sequence.n_computed = None, take_over.n
                self._on_event(ChunkComputed(sequence.key, take_over.n, tuple(take_over.pages)))

    def _prefill(self, chunks: list[Chunk]) -> None:
        for batch, (started, output, computed) in self._batches(chunks, partial(prompt_forward, self._runner)):
            computed.wait()
            elapsed = time.perf_counter() - started
            ends = list(accumulate(chunk.n_tokens for chunk in batch))
            done = []
            for i, chunk in enumerate(batch):
                sequence = chunk.sequence
                if not self._score(chunk, output, ends[i]):
                    continue
                self._scheduler.advance(chunk)
                sequence.prefill_s += elapsed
                if sequence.is_computed:
                    done.append(i)
                elif isinstance(sequence.command, Prefill):
                    with self._failing(sequence):
                        streams = output.streams[ends[i] - 1]
                        for event in report_chunk(self._runner, sequence, sequence.command, streams):
                            self._on_event(event)
            complete = [batch[i].sequence for i in done]
            chosen = choose(
                complete, [[]] * len(done), select_rows(output.logits, done), self._fail, self._sample_kernel
            )
            for i, sequence, choices in zip(done, complete, chosen, strict=True):
                if choices is not None:
                    with self._failing(sequence):
                        self._end_prompt(sequence, choices, output.streams[ends[i] - 1])

    def _score(self, chunk: Chunk, output: ForwardOutput, end: int) -> bool:
        """Reports what the rows of a chunk, which end at row ``end`` of the step, think of the prompt's tokens behind
        them, if that was asked for. False: the request has failed.
        """
        sequence = chunk.sequence
        if sequence.n_top is None or output.hidden is None:
            return True
        first = sequence.n_computed + 1  # the first row is about the token behind it
        targets = sequence.tokens[first : first + chunk.n_tokens]
        start, began = end - chunk.n_tokens, time.perf_counter()
        try:
            rows = score_rows(
                self._runner.logits,
                output.hidden[start : start + len(targets)],
                targets,
                n_top=sequence.n_top,
                vocab_size=self._runner.model.config.vocab_size,
                kernel=self._sample_kernel,
            )
        except Exception as error:  # noqa: BLE001  (logged with the failure)
            self._fail(sequence, error)
            return False
        sequence.prefill_s += time.perf_counter() - began
        if rows:
            self._on_event(PromptScored(sequence.key, rows))
        return True

    def _end_prompt(self, sequence: Sequence, choices: list[TokenLogprob], streams: torch.Tensor) -> None:
        """A prompt is computed, up to ``streams`` ``[N, D]`` of its last position, and its next token is chosen."""
        if isinstance(sequence.command, Prefill):
            self._scheduler.remove(sequence.key)  # from here on its state belongs to the sender
            for event in hand_over(self._runner, sequence, sequence.command, choices[0], streams):
                self._on_event(event)
            return
        if not sequence.request.sampling.max_tokens:
            self._on_event(Output(sequence.key, TokenOutput((), "", finish_reason=FinishReason.LENGTH)))
            self._finish(sequence, FinishReason.LENGTH)
            return
        if self._spec_tokens:
            sequence.draft = DraftState.after_prompt(streams)
        self._append(sequence, choices)

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _append(self, sequence: Sequence, choices: list[TokenLogprob], *, n_proposed: int = 0) -> None:
        """Adds chosen tokens to a running sequence and reports them; ends the sequence if one of them does.

        Of ``n_proposed`` drafted tokens those count as accepted that were given out beside the one that every step
        gives: those behind the end of the answer do not count.
        """
        ids = [choice.token_id for choice in choices]
        sequence.tokens.extend(ids)
        sequence.rules.take(ids)
        output = sequence.processor.feed(ids, choices)
        if output is not None:
            if n_proposed:
                n_accepted = len(output.token_ids) - 1
                output = msgspec.structs.replace(output, n_proposed=n_proposed, n_accepted=n_accepted)
            self._on_event(Output(sequence.key, output))
            if output.finish_reason is not None:
                self._finish(sequence, output.finish_reason)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _finish(self, request: Sequence | Begin, reason: FinishReason) -> None:
        """Ends a request whose memory nothing writes to any more."""
        self._scheduler.remove(request.key)
        self._runner.mark().wait()
        if isinstance(request, Sequence) and request.completed is not None:
            tokens, pages = tuple(request.tokens[: request.n_computed]), tuple(request.completed.digests)
            self._on_event(Finished(request.key, reason, tokens, pages))
        else:
            self._on_event(Finished(request.key, reason))

    def _fail(self, request: Sequence | Begin, error: Exception) -> None:
        """Ends a request with an error. Nothing writes to its memory any more."""
        failure = failure_of(error)
        trace = error if failure.code == "engine_error" else None
        log.error("request %s failed: %s: %s", request.key, failure.code, failure.reason, exc_info=trace)
        self._scheduler.remove(request.key)
        self._runner.mark().wait()
        self._on_event(ComputeFailed(request.key, failure))

    @contextlib.contextmanager
    def _failing(self, request: Sequence | Begin) -> Iterator[None]:
        """An error inside is this request's end, and nothing else's."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (logged with the failure)
            self._fail(request, error)

    def _batches(self, items: list[Item], forward: Callable[[list[Item]], T]) -> Iterator[tuple[list[Item], T]]:
        """``items`` with the result of their common forward. If that fails, each alone, without those that fail alone
        too, or cannot be computed again, and so have ended.
        """
        try:
            result = forward(items)
        except Exception as error:  # noqa: BLE001  (logged here, or with the failure)
            if len(items) == 1:
                self._fail(items[0].sequence if isinstance(items[0], Chunk) else items[0], error)
                return
            log.warning("a step over %d requests failed (%s), trying each alone", len(items), error)
            failure = error
        else:
            yield items, result
            return
        for item in items:
            if isinstance(item, Chunk) and not _is_repeatable(item, failure):
                self._fail(item.sequence, failure)
            else:
                yield from self._batches([item], forward)


def _is_repeatable(chunk: Chunk, error: Exception) -> bool:
    """Whether ``chunk`` can be computed again after ``error``. A step may end after it has written, and a chunk is
    longer than what the rings keep beside the window: the rows before it, also restored ones, are then gone. (A decode
    step's few rows fit.)
    """
    return chunk.sequence.n_computed == 0 or isinstance(error, BadStep)
