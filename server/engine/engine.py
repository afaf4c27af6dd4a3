"""The engine thread: takes commands, computes step after step, reports events. It alone touches the model and the
pools.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

import torch

from server.engine.events import (
    Cancel,
    ChunkComputed,
    Command,
    Died,
    Event,
    Failed,
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
from server.engine.stopping import OutputProcessor
from server.model.network import ForwardOutput

log = logging.getLogger(__name__)


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
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self._runner, self._tokenizer, self._on_event, self._threads = runner, tokenizer, on_event, threads
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._scheduler = Scheduler(chunk_tokens)
        self._stopping = False

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
            case Prefill():
                sequence = self._sequence(command, Goal.HAND_OVER)
                sequence.room, sequence.epoch = command.room, command.epoch
                self._scheduler.prefilling.append(sequence)
            case Generate():
                self._scheduler.prefilling.append(self._sequence(command, Goal.ANSWER))
            case Resume():
                sequence = self._sequence(command, Goal.ANSWER)
                sequence.n_computed = sequence.n_prompt
                self._scheduler.decoding[sequence.key] = sequence
                self._append(sequence, command.first)
            case Cancel(key):
                if (found := self._scheduler.find(key)) is not None:
                    self._finish(found, FinishReason.ABORT)
            case Scrub(key, placement):
                self._runner.scrub(placement)
                self._on_event(Scrubbed(key))
            case Stop():
                self._stopping = True

    def _sequence(self, command: Prefill | Generate | Resume, goal: Goal) -> Running:
        request: GenerationRequest = command.request
        processor = OutputProcessor(self._tokenizer, request.sampling, request.prompt_ids)
        return Running(command.key, request, command.placement, goal, processor, list(request.prompt_ids))

    def _step(self) -> None:
        """One token for every running request, then the next piece of the oldest prompts."""
        if running := list(self._scheduler.decoding.values()):
            self._decode(running)
        if chunks := self._scheduler.next_chunks():
            self._prefill(chunks)

    def _decode(self, running: Sequence[Running]) -> None:
        output = self._guarded(running, lambda: self._runner.forward([s.segment(1) for s in running]))
        if output is None:
            self._one_by_one(running, lambda s: self._decode([s]))
            return
        for sequence in running:
            sequence.n_computed += 1
        for sequence, choice in zip(running, self._sample(running, output.logits), strict=True):
            if choice is not None:
                self._append(sequence, choice)

    def _prefill(self, chunks: Sequence[Chunk]) -> None:
        started = time.perf_counter()
        sequences = [chunk.sequence for chunk in chunks]
        output = self._guarded(
            sequences, lambda: self._runner.forward([c.sequence.segment(c.n_tokens) for c in chunks])
        )
        if output is None:
            parts = {id(chunk.sequence): chunk for chunk in chunks}
            self._one_by_one(sequences, lambda s: self._prefill([parts[id(s)]]))
            return
        self._runner.synchronize()
        elapsed = time.perf_counter() - started
        done = [(i, chunk.sequence) for i, chunk in enumerate(chunks) if chunk.completes]
        for chunk in chunks:
            chunk.sequence.n_computed += chunk.n_tokens
            chunk.sequence.prefill_s += elapsed
            if chunk.sequence.goal is Goal.HAND_OVER and chunk.sequence.n_computed < chunk.sequence.n_prompt:
                self._on_event(ChunkComputed(chunk.sequence.key, chunk.sequence.n_computed))
        if not done:
            return
        for sequence in (sequence for _, sequence in done):
            self._scheduler.prefilling.remove(sequence)
            self._scheduler.decoding[sequence.key] = sequence
        rows = [i for i, _ in done]
        choices = self._sample([sequence for _, sequence in done], output.logits[rows])
        for (i, sequence), choice in zip(done, choices, strict=True):
            if choice is None:
                continue
            if sequence.goal is Goal.HAND_OVER:
                self._hand_over(sequence, choice, output.streams[i])
            else:
                self._append(sequence, choice)

    def _hand_over(self, sequence: Running, first: TokenLogprob, streams: torch.Tensor) -> None:
        """The end of a prompt on a prefill node: from here on its state belongs to the sender until it is scrubbed."""
        self._scheduler.drop(sequence.key)
        started = time.perf_counter()
        prompt, placement = sequence.request.prompt_ids, sequence.placement
        digests = self._runner.hand_over(sequence.room, sequence.epoch, prompt, placement, first, streams)
        digest_s = time.perf_counter() - started
        self._on_event(PrefillFinished(sequence.key, first, digests, sequence.prefill_s, digest_s))

    def _sample(self, sequences: Sequence[Running], logits: torch.Tensor) -> list[TokenLogprob | None]:
        """One token for each sequence; a sequence whose logits are not finite is failed and gets None."""
        rows = [
            RowSampling(s.request.sampling, s.request.sampling.seed or 0, len(s.tokens), s.processor.banned_ids)
            for s in sequences
        ]
        try:
            return list(sample(logits, rows))
        except NonFiniteLogits as error:
            good = [i for i in range(len(sequences)) if i not in error.rows]
            for i in error.rows:
                self._fail(
                    sequences[i],
                    "non_finite_logits",
                    "the model's output is not a number: it read state that was never written",
                )
            chosen: list[TokenLogprob | None] = [None] * len(sequences)
            for i, choice in zip(good, sample(logits[good], [rows[i] for i in good]), strict=True):
                chosen[i] = choice
            return chosen

    def _append(self, sequence: Running, choice: TokenLogprob) -> None:
        """Adds a chosen token to a running sequence and reports it; ends the sequence if the token does."""
        sequence.tokens.append(choice.token_id)
        output = sequence.processor.feed([choice.token_id], [choice])
        if output is not None:
            self._on_event(Output(sequence.key, output))
            if output.finish_reason is not None:
                self._finish(sequence, output.finish_reason)

    def _finish(self, sequence: Running, reason: FinishReason) -> None:
        self._release(sequence)
        self._on_event(Finished(sequence.key, reason))

    def _fail(self, sequence: Running, code: str, message: str) -> None:
        log.error("request %s failed: %s: %s", sequence.key, code, message)
        self._release(sequence)
        self._on_event(Failed(sequence.key, code, message))

    def _release(self, sequence: Running) -> None:
        self._scheduler.drop(sequence.key)
        self._runner.scrub(sequence.placement)

    def _guarded(self, sequences: Sequence[Running], forward: Callable[[], ForwardOutput]) -> ForwardOutput | None:
        """Runs a forward. An error in a batch of one fails that request; in a larger batch the caller tries them one
        by one.
        """
        try:
            return forward()
        except Exception as error:
            log.exception("forward over %d requests failed", len(sequences))
            if len(sequences) == 1:
                self._fail(sequences[0], "engine_error", f"{type(error).__name__}: {error}")
            return None

    def _one_by_one(self, sequences: Sequence[Running], step: Callable[[Running], None]) -> None:
        """After a failed batch: repeats the step for each request alone (a forward may be repeated: it writes the
        same rows).
        """
        if len(sequences) > 1:
            for sequence in sequences:
                step(sequence)
