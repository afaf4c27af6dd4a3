"""The generations behind one HTTP request: started together, read to the end, and aborted with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from server.api.request_id import current_request
from server.engine.request import Backend, FinishReason, Generation, GenerationRequest, TokenOutput
from server.failure import Failure, RequestFailed


class Generations:
    """One or more running generations, and the queue of what they gave out and nobody has taken yet. :meth:`abort` must
    be called when the request is over, whatever has happened.

    What a client is slow to read waits here: at most its whole answer, while the connection lasts.
    """

    def __init__(self, backend: Backend, requests: Sequence[GenerationRequest], *, n_samples: int = 1) -> None:
        """Submits all of ``requests``, or none if one of them is refused. ``n_samples`` of each prompt lie side by
        side.

        :raises RequestFailed: the backend's refusal.
        """
        self._all: list[Generation] = []
        self._n_samples = n_samples
        self._open: dict[int, Generation] = {}
        self._n_running = len(requests)
        self._failure: Exception | None = None
        self._waiting: deque[tuple[int, TokenOutput]] = deque()
        self._reader: Callable[[], None] | None = None
        self._is_read_soon = False
        self._wake = asyncio.Event()
        try:
            for index, request in enumerate(requests):
                self._open[index] = _submit(backend, request)
        except BaseException:
            self.abort()
            raise
        self._all += self._open.values()
        for index, generation in enumerate(self._all):
            generation.listen(partial(self._arrives, index))
        if (http_request := current_request()) is not None:
            http_request.taken_on = True

    def __len__(self) -> int:
        return len(self._all)

    def abort(self) -> None:
        """Aborts what has not come to its end by itself. May be called more than once."""
        while self._open:
            self._open.popitem()[1].abort()

    @property
    def route_headers(self) -> dict[str, str]:
        """``x-pd-prefill``: who computed the prompts (each once); ``x-pd-room``: one room for every generation, if any;
        ``x-pd-draft-state``: with speculation, where the draft's window came from. ``x-pd-retries``: how often a prompt
        was computed by another prefill node because one had failed, if ever. Nothing while one of the prompts is not
        committed here.
        """
        routes = [generation.known_route for generation in self._all]
        known = [route for route in routes if route is not None]
        if len(known) < len(routes):
            return {}
        headers = {"x-pd-prefill": ",".join(dict.fromkeys(route.prefill for route in known))}
        rooms = [str(route.room) for route in known if route.room is not None]
        if rooms:
            headers["x-pd-room"] = ",".join(rooms)
        if states := dict.fromkeys(route.draft_state for route in known if route.draft_state is not None):
            headers["x-pd-draft-state"] = ",".join(states)
        if n_retries := sum(route.n_retries for route in known):
            headers["x-pd-retries"] = str(n_retries)
        return headers

    def cached_tokens_of(self, index: int) -> int:
        """Tokens of the prompt of generation ``index`` that were found in a cache; 0 while it is not committed here."""
        route = self._all[index].known_route
        return 0 if route is None else route.cached_tokens

    @property
    def cached_tokens(self) -> int:
        """The same of all prompts. A prompt of several samples counts once, with what the sample found that found the
        least: what the others found beyond it was computed for this request.
        """
        found = [self.cached_tokens_of(index) for index in range(len(self._all))]
        return sum(min(found[first : first + self._n_samples]) for first in range(0, len(found), self._n_samples))

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def has_waiting(self) -> bool:
        """Whether something can be taken."""
        return bool(self._waiting)

    @property
    def is_over(self) -> bool:
        """Whether all have ended and everything is taken."""
        return not self._n_running and not self._waiting

    @property
    def _is_ended(self) -> bool:
        """Whether nothing more will come."""
        return not self._n_running or self._failure is not None

    def take(self) -> tuple[int, TokenOutput] | None:
        """The next output, in the order of their coming, with its generation's index; None if none waits."""
        if not self._waiting:
            return None
        item = self._waiting.popleft()
        if not self._waiting and self._is_ended:
            self._wake.set()
        return item

    async def wait(self, within_s: float | None = None) -> bool:
        """Until something can be taken, or everything is over: False if ``within_s`` seconds go by before.

        With a reader (:meth:`read_by`) only the end counts.

        :raises RequestFailed: one of them failed or was aborted, and what came before it is taken.
        """
        is_ready = self._is_ended if not self._waiting else self._reader is None
        if not is_ready:
            self._wake.clear()
            try:
                async with asyncio.timeout(within_s):
                    await self._wake.wait()
            except TimeoutError:
                return False
        if self._failure is not None and not self._waiting:
            raise self._failure
        return True

    @contextlib.contextmanager
    def read_by(self, reader: Callable[[], None]) -> Iterator[None]:
        """Inside, ``reader`` is called whenever something has come, without a task that has to wake up: in the same
        call, or with several generations right after it, once for all that come together.

        What it does not take stays; :meth:`read` has it look again. What it raises, :meth:`wait` raises.
        """
        self._reader = reader
        try:
            self.read()
            yield
        finally:
            self._reader = None

    def read(self) -> None:
        """Calls the reader, if there is one."""
        if self._reader is not None:
            try:
                self._reader()
            except Exception as error:  # noqa: BLE001  (raised again by `wait`)
                self._waiting.clear()
                self._fail(error)

    def _read_soon(self) -> None:
        self._is_read_soon = False
        self.read()

    def _arrives(self, index: int, item: TokenOutput | RequestFailed) -> None:
        if self._failure is not None:
            return
        if isinstance(item, TokenOutput) and item.finish_reason is not FinishReason.ABORT:
            if item.finish_reason is not None:
                self._n_running -= 1
                self._open.pop(index, None)
            self._waiting.append((index, item))
            if self._reader is None:
                self._wake.set()
            elif len(self._all) == 1:
                self.read()
            elif not self._is_read_soon:
                self._is_read_soon = True
                asyncio.get_running_loop().call_soon(self._read_soon)
        elif isinstance(item, RequestFailed):
            self._fail(item)
        else:
            reason = "The server gave this request up before it was finished."
            self._fail(RequestFailed(Failure("aborted", reason)))

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._wake.set()


def _submit(backend: Backend, request: GenerationRequest) -> Generation:
    if (http_request := current_request()) is not None:
        arrived_at, traceparent = http_request.arrived_at, http_request.traceparent
        request = replace(request, arrived_at=arrived_at, traceparent=traceparent)
    try:
        return backend.submit(request)
    except RequestFailed as failure:
        if request.routed is not None:
            failure.room = request.routed.room
        raise
