"""What a request's client gets from a hand-off and from the engine, counted in its record and in the metrics."""

from __future__ import annotations

from server.decode.draft_metrics import DraftMetrics
from server.decode.prefill_link import PrefillLink
from server.decode.request import DecodeRequest
from server.decode.request_queue import RequestQueue
from server.decode.room import Commit
from server.decode.settings import DecodeSettings
from server.engine.events import ComputeFailed, Event, Finished, Output, PromptScored
from server.engine.prompt_logprobs import ENTRY_NBYTES, PromptLogprobs
from server.engine.request import RouteInfo, TokenOutput
from server.failure import RequestFailed
from server.node.context import NodeContext
from server.telemetry.latency import RequestMetrics
from server.telemetry.rooms import RoomRecorder


class Outputs:
    """Of all requests of a decode node. An output came when ``queue`` was told of the engine's progress last."""

    def __init__(
        self, settings: DecodeSettings, context: NodeContext, request_metrics: RequestMetrics, queue: RequestQueue
    ) -> None:
        self._draft_state = settings.draft_state
        self._is_local = settings.prefill is None
        self._local_route = RouteInfo("local", None, draft_state=settings.draft_state)
        self._metrics = context.metrics
        self._hooks = context.hooks
        self._request_metrics, self._token_metrics = request_metrics, request_metrics.tokens
        self._draft_metrics: DraftMetrics | None = None
        if settings.draft_state is not None:
            self._draft_metrics = DraftMetrics(context.metrics.registry, settings.spec_tokens, settings.draft_state)
        self._queue = queue

    def accept_lengths(self) -> dict[str, int]:
        """Steps with drafts, by the number of tokens that they gave out."""
        return {} if self._draft_metrics is None else self._draft_metrics.lengths()

    def committed(self, req: DecodeRequest, link: PrefillLink, commit: Commit) -> None:
        """The state of the prompt, and what else its prefill node had to say, is here."""
        nbytes = {sent.component: sent.nbytes for sent in commit.done.sent}
        route = RouteInfo(
            link.address, req.key.room, nbytes, self._draft_state, req.n_retries, cached_tokens=commit.done.n_reused
        )
        req.generation.set_route(route)
        req.record.moved(commit.done)
        n_top = req.request.sampling.prompt_logprobs
        if commit.scores is not None and n_top is not None:
            req.generation.prompt_logprobs = PromptLogprobs(n_top, commit.scores)
            self._metrics.prompt_logprobs(len(commit.scores) // ENTRY_NBYTES)

    def take(self, req: DecodeRequest, event: Event) -> None:
        """Takes one of the engine's events about a request."""
        match event:
            case PromptScored():
                req.scores += event.rows
                self._metrics.prompt_logprobs(len(event.rows) // ENTRY_NBYTES)
            case Output() if not req.generation.ended:
                n_top = req.request.sampling.prompt_logprobs
                if self._is_local and n_top is not None and not req.record.n_generated:
                    req.generation.prompt_logprobs = PromptLogprobs(n_top, req.scores)
                req.generation.set_route(self._local_route)
                self._count(req.record, event.output)
                req.generation.put(event.output)
            case Finished():
                req.generation.set_route(self._local_route)
                req.generation.finish(event.reason)
            case ComputeFailed():
                req.generation.fail(RequestFailed(event.failure))
            case _:
                pass

    def _count(self, record: RoomRecorder, output: TokenOutput) -> None:
        """Counts an output. It runs for every token: plain numbers, and the reading of the clock that there is."""
        now, n_tokens = self._queue.moved_at, len(output.token_ids)
        if not n_tokens:
            return  # the end of a request that wants none
        if record.n_steps:
            self._token_metrics.next_output(n_tokens, now - record.token_at)
        else:
            self._hooks.entered("decode")
            record.first_token(now)
            self._request_metrics.first_token(record, n_tokens)
        if self._draft_metrics is not None and output.n_proposed:
            self._draft_metrics.step(output, record.n_generated)
            record.n_proposed += output.n_proposed
            record.n_accepted += output.n_accepted
        record.token_at = now
        record.n_steps += 1
        record.n_generated += n_tokens
