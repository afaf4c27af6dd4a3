"""Large bodies are read one piece after the other, so that a small request finds the event loop free between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl


class ReadingTurns:
    """Connections that wait to go on reading: one of them does in each round of the event loop, the longest waiting
    first.
    """

    def __init__(self) -> None:
        self._waiting: dict[FairFlow, None] = {}
        self._is_coming = False

    def wait(self, flow: FairFlow) -> None:
        """``flow`` goes on reading when its turn comes."""
        self._waiting.setdefault(flow)
        self._call_soon()

    def leave(self, flow: FairFlow) -> None:
        """``flow`` reads no more."""
        self._waiting.pop(flow, None)

    def _call_soon(self) -> None:
        if not self._is_coming:
            self._is_coming = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_coming = False
        if (flow := next(iter(self._waiting), None)) is not None:
            self.leave(flow)
            flow.take_turn()
        if self._waiting:
            self._call_soon()


class FairFlow(FlowControl):
    """The flow control of one connection. While it ``is_large``, it waits for its turn among ``turns`` whenever it has
    been stopped and may go on.
    """

    def __init__(self, transport: asyncio.Transport, turns: ReadingTurns, is_large: Callable[[], bool]) -> None:
        super().__init__(transport)
        self._turns, self._is_large = turns, is_large

    def resume_reading(self) -> None:
        if self.read_paused and self._is_large():
            self._turns.wait(self)
        else:
            self.take_turn()

    def take_turn(self) -> None:
        """Goes on reading now."""
        self._turns.leave(self)
        super().resume_reading()
