"""The engine thread: takes commands, computes step after step, reports events. It alone touches model and pools."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from server.cache.live import LIVE_RULES
from server.cache.owners import Owner, WrongOwner
from server.engine.events import (
    Cancel,
    ChunkComputed,
    Command,
    ComputeFailed,
    Died,
    Event,
    Finished,
    Generate,
    Output,
    Prefill,
    PrefillFinished,
    Resume,
    Scrub,
    Scrubbed,
    Stop,
)
from server.engine.request import FinishReason, GenerationRequest, TokenizerLike, TokenLogprob
from server.engine.runner import ModelRunner
from server.engine.sampler import NonFiniteLogits, RowSampling, sample
from server.engine.scheduler import Chunk, Goal, Scheduler
from server.engine.scheduler import Sequence as Running
from server.engine.speculation import DraftState, accepted, propose
from server.engine.stopping import OutputProcessor
from server.failure import Failure
from server.model.batch import Segment
from server.model.network import ForwardOutput

log = logging.getLogger(__name__)

T = TypeVar("T")

_NON_FINITE = Failure("non_finite_logits", "the model's output is not a number: it read state that was never written")


class Engine(threading.Thread):
    """Continuous batching over one :class:`ModelRunner`.

    ``on_event`` is called in this thread for every event. ``chunk_tokens`` bounds the prompt tokens of one step,
    ``threads`` the CPU threads of one operation. Commands may be submitted from any thread.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: TokenizerLike,
        on_event: Callable[[Event], None],
        *,
        chunk_tokens: int = 256,
        threads: int = 1,
        spec_tokens: int = 0,
        cold_draft: bool = False,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._runner, self._tokenizer, self._on_event, self._threads = runner, tokenizer, on_event, threads
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._scheduler = Scheduler(chunk_tokens)
        self._spec_tokens, self._cold_draft = spec_tokens, cold_draft
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

    @property
    def load(self) -> dict[str, int]:
        """Requests that decode and prompts that are waiting or being computed (a snapshot, for people)."""
        return {"decoding": len(self._scheduler.decoding), "prefilling": len(self._scheduler.prefilling)}

    def run(self) -> None:
        torch.set_num_threads(self._threads)
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
                try:
                    self._take(command)
                except Exception as error:
                    log.exception("%s could not be begun", command.key)
                    self._scheduler.drop(command.key)
                    self._runner.scrub(command.placement)
                    self._on_event(ComputeFailed(command.key, _engine_error(error)))
            case Cancel(key):
                if (found := self._scheduler.find(key)) is not None:
                    self._finish(found, FinishReason.ABORT)
            case Scrub(key, placement):
                self._runner.scrub(placement)
                self._on_event(Scrubbed(key))
            case Stop():
                self._stopping = True

    def _take(self, command: Prefill | Generate | Resume) -> None:
        """Begins a request."""
        match command:
            case Prefill():
                sequence = self._sequence(command, Goal.HAND_OVER)
                sequence.room, sequence.epoch, sequence.owner = command.room, command.epoch, command.owner
                self._scheduler.prefilling.append(sequence)
            case Generate():
                self._scheduler.prefilling.append(self._sequence(command, Goal.ANSWER))
            case Resume():
                self._resume(command)

    def _resume(self, command: Resume) -> None:
        """Decodes on from a prompt that another node computed; its first token may already be the last."""
        sequence = self._sequence(command, Goal.ANSWER)
        if not self._owns(sequence, command.owner):
            return
        n = sequence.n_computed = sequence.n_prompt
        self._scheduler.decoding[sequence.key] = sequence
        if self._spec_tokens:
            streams = self._runner.handed_streams(sequence.placement)
            sequence.draft = DraftState(streams[None], valid_from=n - 1 if self._cold_draft else 0)
        self._append(sequence, [command.first])

    def _sequence(self, command: Prefill | Generate | Resume, goal: Goal) -> Running:
        request: GenerationRequest = command.request
        processor = OutputProcessor(self._tokenizer, request.sampling, request.prompt_ids)
        return Running(command.key, request, command.placement, goal, processor, list(request.prompt_ids))

    def _step(self) -> None:
        """One token (or several, with drafts) for every running request, then the next piece of the oldest prompts."""
        if running := list(self._scheduler.decoding.values()):
            self._decode(running)
        if chunks := self._scheduler.next_chunks():
            self._prefill(chunks)

    def _decode(self, running: Sequence[Running]) -> None:
        step = self._guarded(running, lambda: self._draft_and_verify(running))
        if step is None:
            self._one_by_one(running, lambda s: self._decode([s]))
            return
        drafts, output = step
        chosen = self._choose(running, [1 + len(draft) for draft in drafts], output.logits)
        row = 0
        for sequence, draft, choices in zip(running, drafts, chosen, strict=True):
            if choices is not None:
                n = accepted(choices, draft)
                sequence.n_computed += 1 + n
                if sequence.draft is not None:
                    streams = output.streams[row : row + 1 + n]
                    sequence.draft = DraftState(streams, sequence.draft.valid_from)
                self._guarded([sequence], partial(self._append, sequence, choices[: 1 + n], n_proposed=len(draft)))
            row += 1 + len(draft)

    def _draft_and_verify(self, running: Sequence[Running]) -> tuple[list[list[int]], ForwardOutput]:
        """Drafts for each request (empty ones without speculation), and the target's forward over them."""
        drafts: list[list[int]] = [[] for _ in running]
        chains = {i: start for i, s in enumerate(running) if (start := s.chain_start(self._spec_tokens)) is not None}
        if chains:
            for i, draft in zip(chains, propose(self._runner, list(chains.values())), strict=True):
                drafts[i] = draft
        segments = [sequence.verify_segment(draft) for sequence, draft in zip(running, drafts, strict=True)]
        return drafts, self._runner.forward(segments, every_row=True)

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        started = time.perf_counter()
        sequences = [chunk.sequence for chunk in chunks]
        output = self._guarded(sequences, lambda: self._prompt_forward(chunks))
        if output is None:
            parts = {id(chunk.sequence): chunk for chunk in chunks}
            self._one_by_one(sequences, lambda s: self._prefill([parts[id(s)]]))
            return
        self._runner.synchronize()
        elapsed = time.perf_counter() - started
        row, done = 0, []
        for i, chunk in enumerate(chunks):
            row += chunk.n_tokens
            if chunk.completes:
                done.append((i, row - 1, chunk.sequence))
            chunk.sequence.n_computed += chunk.n_tokens
            chunk.sequence.prefill_s += elapsed
            if chunk.sequence.goal is Goal.HAND_OVER and chunk.sequence.n_computed < chunk.sequence.n_prompt:
                self._on_event(ChunkComputed(chunk.sequence.key, chunk.sequence.n_computed))
        if not done:
            return
        for _, _, sequence in done:
            self._scheduler.prefilling.remove(sequence)
            self._scheduler.decoding[sequence.key] = sequence
        finished = [sequence for _, _, sequence in done]
        chosen = self._choose(finished, [1] * len(done), output.logits[[i for i, _, _ in done]])
        for (_, last, sequence), choices in zip(done, chosen, strict=True):
            if choices is None:
                continue
            if sequence.goal is Goal.HAND_OVER:
                self._guarded([sequence], partial(self._hand_over, sequence, choices[0], output.streams[last]))
            else:
                if self._spec_tokens:
                    sequence.draft = DraftState(output.streams[last : last + 1])
                self._guarded([sequence], partial(self._append, sequence, choices))

    def _prompt_forward(self, chunks: Sequence[Chunk]) -> ForwardOutput:
        """The target over the chunks, then the draft's window rows that will be read: position t with the prompt's
        token t + 1.
        """
        output = self._runner.forward([chunk.sequence.segment(chunk.n_tokens) for chunk in chunks])
        if not self._runner.drafts:
            return output
        segments, streams, row = [], [], 0
        for chunk in chunks:
            sequence = chunk.sequence
            first = sequence.n_computed
            rows = LIVE_RULES["draft_swa"](sequence.n_prompt, self._runner.arena.layout.window)
            part = range(max(first, rows.start), min(first + chunk.n_tokens, rows.stop))
            if part:
                segments.append(
                    Segment(sequence.tokens[part.start + 1 : part.stop + 1], part.start, sequence.placement)
                )
                streams.append(output.streams[row + part.start - first : row + part.stop - first])
            row += chunk.n_tokens
        if segments:
            self._runner.draft_rows(segments, torch.cat(streams))
        return output

    def _hand_over(self, sequence: Running, first: TokenLogprob, streams: torch.Tensor) -> None:
        """The end of a prompt on a prefill node: from here on its state belongs to the sender until it is scrubbed."""
        self._scheduler.drop(sequence.key)
        if not self._owns(sequence, sequence.owner):
            return
        started = time.perf_counter()
        prompt, placement = sequence.request.prompt_ids, sequence.placement
        digests = self._runner.hand_over(sequence.room, sequence.epoch, prompt, placement, first, streams)
        digest_s = time.perf_counter() - started
        self._on_event(PrefillFinished(sequence.key, first, digests, sequence.prefill_s, digest_s))

    def _owns(self, sequence: Running, owner: Owner | None) -> bool:
        """Whether the memory of the prompt's state is stamped with ``owner``; if not, the sequence is failed."""
        if owner is None:
            return True
        try:
            self._runner.check_owner(owner, sequence.n_prompt, sequence.placement)
        except WrongOwner as error:
            log.error("request %s failed: %s", sequence.key, error)
            self._scheduler.drop(sequence.key)  # not scrubbed: the memory may be somebody else's
            self._on_event(ComputeFailed(sequence.key, error.failure))
            return False
        return True

    def _choose(
        self, sequences: Sequence[Running], widths: Sequence[int], logits: torch.Tensor
    ) -> list[list[TokenLogprob] | None]:
        """Tokens for ``widths[i]`` consecutive rows of each sequence; one whose logits are not finite is failed and
        gets None.
        """
        rows, owner = [], []
        for i, (s, width) in enumerate(zip(sequences, widths, strict=True)):
            params = s.request.sampling
            for j in range(width):
                banned = s.processor.banned_ids_at(s.processor.n_generated + j)
                rows.append(RowSampling(params, params.seed or 0, len(s.tokens) + j, banned))
                owner.append(i)
        bad: set[int] = set()
        while True:
            kept = [r for r, i in enumerate(owner) if i not in bad]
            try:
                choices = sample(logits if not bad else logits[kept], [rows[r] for r in kept])
                break
            except NonFiniteLogits as error:
                bad |= {owner[kept[r]] for r in error.rows}
        for i in bad:
            self._fail(sequences[i], _NON_FINITE)
        chosen: list[list[TokenLogprob] | None] = [None if i in bad else [] for i in range(len(sequences))]
        for r, choice in zip(kept, choices, strict=True):
            if (mine := chosen[owner[r]]) is not None:
                mine.append(choice)
        return chosen

    def _append(self, sequence: Running, choices: Sequence[TokenLogprob], *, n_proposed: int = 0) -> None:
        """Adds chosen tokens to a running sequence and reports them; ends the sequence if one of them does.

        Of ``n_proposed`` drafted tokens those count as accepted that were given out beside the one that every step
        gives: what stood behind the end of the answer was of no use.
        """
        ids = [choice.token_id for choice in choices]
        sequence.tokens.extend(ids)
        output = sequence.processor.feed(ids, choices)
        if output is not None:
            n_accepted = len(output.token_ids) - 1 if n_proposed else 0
            self._on_event(Output(sequence.key, replace(output, n_proposed=n_proposed, n_accepted=n_accepted)))
            if output.finish_reason is not None:
                self._finish(sequence, output.finish_reason)

    def _finish(self, sequence: Running, reason: FinishReason) -> None:
        self._release(sequence)
        self._on_event(Finished(sequence.key, reason))

    def _fail(self, sequence: Running, failure: Failure) -> None:
        log.error("request %s failed: %s: %s", sequence.key, failure.code, failure.reason)
        self._release(sequence)
        self._on_event(ComputeFailed(sequence.key, failure))

    def _release(self, sequence: Running) -> None:
        self._scheduler.drop(sequence.key)
        self._runner.scrub(sequence.placement)

    def _guarded(self, sequences: Sequence[Running], compute: Callable[[], T]) -> T | None:
        """Runs a computation. An error in a batch of one fails that request; of a larger batch the caller tries each
        alone.
        """
        try:
            return compute()
        except Exception as error:
            if len(sequences) > 1:
                log.warning("a step over %d requests failed (%s), trying each alone", len(sequences), error)
            elif isinstance(error, NonFiniteLogits):
                self._fail(sequences[0], _NON_FINITE)
            else:
                log.exception("a step of %s failed", sequences[0].key)
                self._fail(sequences[0], _engine_error(error))
            return None

    def _one_by_one(self, sequences: Sequence[Running], step: Callable[[Running], None]) -> None:
        """After a failed batch: repeats the step for each request alone (a forward may be repeated: it writes the same
        rows).
        """
        if len(sequences) > 1:
            for sequence in sequences:
                step(sequence)


def _engine_error(error: Exception) -> Failure:
    return Failure("engine_error", f"{type(error).__name__}: {error}")
