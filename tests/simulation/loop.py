"""An asyncio event loop in which time is a number: it jumps to the next timer and never sleeps."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class Stuck(AssertionError):
    """Tasks wait, and nothing will ever happen."""


class Process:
    """One life of one simulated node: what runs for it, until it is killed."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.is_dead = False
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(PROCESS.set, self)
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, what: Callable[..., object], *args: object) -> None:
        """Calls ``what`` as a part of this process, unless it is dead."""
        if not self.is_dead:
            self._context.copy().run(what, *args)

    def later(self, delay_s: float, what: Callable[..., object], *args: object) -> None:
        self._loop.call_later(delay_s, self.run, what, *args)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def kill(self) -> None:
        """It does nothing any more. What a task does about its end has no effect: everything around it is dead."""
        self.is_dead = True
        for task in list(self._tasks):
            task.cancel()


class VirtualLoop(asyncio.BaseEventLoop):
    """Calls in threads are made in the loop, ``call_s()`` seconds after they were asked for.

    Tasks belong to the :data:`PROCESS` that started them.
    """

    def __init__(self, call_s: Callable[[], float]) -> None:
        super().__init__()
        self._now = 0.0
        self._call_s = call_s
        self._selector = self  # what the base class waits with
        self.set_task_factory(_adopted)

    def time(self) -> float:
        return self._now

    def select(self, timeout: float | None) -> list[object]:
        """The wait for the next timer."""
        if timeout is None:
            raise Stuck("nothing will ever happen")
        self._now += timeout
        return []

    def _process_events(self, event_list: list[object]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass  # nobody waits in another thread

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()
        process = PROCESS.get()

        def call() -> None:
            if process is not None and process.is_dead:
                return
            try:
                result = func(*args)
            except Exception as error:  # noqa: BLE001  (the caller gets it)
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        self.call_later(self._call_s(), call)
        return future


def _adopted(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(coro, loop=loop, **options)
    process = PROCESS.get()
    if process is not None:
        process.adopt(task)
    return task
