"""Runs a launcher: the process with its log, and what keeps it from starting in one sentence.

It imports little: a wrong option or a port in use is reported before torch is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import uvloop

from server.cache.specs import LayoutError
from server.failure import RequestFailed
from server.faults.spec import FaultError
from server.kernels.errors import KernelsUnavailable
from server.memory import keep_one_heap
from server.model.config import CheckpointError
from server.node.checks import DeviceUnavailable
from server.node.logs import open_standard_streams, process_log
from server.node.options import NodeOptions
from server.node.ports import PortError
from server.threads import limit_spinning
from server.transfer.auth import AuthError
from server.transfer.deadlines import DeadlineError
from server.transfer.engines.base import TransferError

log = logging.getLogger(__name__)

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""They ask a node to end. The last one comes when its terminal is closed."""

STARTUP_ERRORS = (
    AuthError,
    CheckpointError,
    DeviceUnavailable,
    KernelsUnavailable,
    LayoutError,
    PortError,
    TransferError,
    FaultError,
    DeadlineError,
    RequestFailed,
    OSError,
)
"""What a wrong option, checkpoint or port raises, in words that need no addition."""

MAX_SENTENCE_CHARS = 1000


class _EndedEarly(BaseException):
    """A signal asked for the end before the node served."""


def run(prog: str, options: NodeOptions, start: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs ``start`` with the log of a process. What it raises is a start-up error: one sentence on standard error and
    exit code 2.
    """
    keep_one_heap()
    limit_spinning()
    open_standard_streams()
    with process_log(options.log_level):
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        try:
            with _signals_end_at_once(), _no_collection(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(start())
        except _EndedEarly:
            log.info("ended by a signal before it served")
            return 0
        except Exception as error:
            log.debug("the node could not start", exc_info=True)
            sentence = _one_sentence(error)
    with contextlib.suppress(OSError):
        print(f"{prog}: {sentence}", file=sys.stderr)  # noqa: T201  (the command line's own words)
    return 2


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What is imported and loaded stays: looking through it for garbage would take a tenth of the start. The node that
    serves collects again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _one_sentence(error: Exception) -> str:
    words = " ".join(str(error).split())[:MAX_SENTENCE_CHARS]
    if isinstance(error, STARTUP_ERRORS):
        return words
    return f"could not start: {type(error).__name__}: {words} (--log-level debug shows where)"


@contextlib.contextmanager
def _signals_end_at_once() -> Iterator[None]:
    """Until the node serves, and has signal handlers of its own, there is nothing to bring to an end."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise _EndedEarly

    before = {number: signal.getsignal(number) for number in END_SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
