"""Runs a node and notes when each function of server/ was called.

    walk/recorder.py OUTPUT MODULE [OPTION ...]

What is noted goes to OUTPUT as JSON when the process ends. The clock is the machine's monotonic one, which all
processes share.
"""

from __future__ import annotations

import atexit
import json
import runpy
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MOST_CALLS = 20_000
"""Of one function; those that are called more often say nothing about the order of a request's steps."""


@dataclass(frozen=True)
class Calls:
    """One function: ``file`` from the checkout's root, qualified name, number of lines, and when it was called (ns)."""

    file: str
    function: str
    n_lines: int
    at: list[int]


class Recorder:
    """A profile function that notes the calls of functions in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}/"
        self._calls: dict[CodeType, list[int] | None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in self._calls:
            is_ours = code.co_filename.startswith(self._folder) and not code.co_name.startswith("<")
            self._calls[code] = [] if is_ours else None
        at = self._calls[code]
        if at is not None and len(at) < MOST_CALLS:
            at.append(time.monotonic_ns())

    def calls(self) -> list[Calls]:
        found = [(code, at) for code, at in list(self._calls.items()) if at]
        return [
            Calls(str(Path(code.co_filename).relative_to(ROOT)), _name(code), _n_lines(code), at) for code, at in found
        ]


def _name(code: CodeType) -> str:
    return code.co_qualname.replace(".<locals>", "")


def _n_lines(code: CodeType) -> int:
    """Of the whole function, with what is defined in it."""
    last = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
    inner = [_n_lines(each) + each.co_firstlineno - 1 for each in code.co_consts if isinstance(each, CodeType)]
    return max([last, *inner]) - code.co_firstlineno + 1


def read(path: Path) -> list[Calls]:
    """What a recorded process has left behind."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [Calls(**row) for row in rows]


def main(output: str, module: str) -> None:
    recorder = Recorder(ROOT / "server")

    def write() -> None:
        sys.setprofile(None)
        Path(output).write_text(json.dumps([asdict(calls) for calls in recorder.calls()]), encoding="utf-8")

    atexit.register(write)
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    output, module, *rest = sys.argv[1:]
    sys.argv = [module, *rest]
    main(output, module)
