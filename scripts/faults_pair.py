"""A prefill and a decode process whose faults can be changed while they run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from process_pair import Pair, Process, StopSignals, free_ports
from quickstart import BIN, HOST, LOGS, wait_ready

READY_TIMEOUT_S = 180.0


class FaultFiles:
    """The fault files of a pair. The nodes read them again for every room and message."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, role: str) -> Path:
        return self._directory / role

    def arm(self, *, prefill: Sequence[str] = (), decode: Sequence[str] = ()) -> None:
        """The faults from now on. Each file is put in place whole, so that no node reads half of one."""
        for role, faults in (("prefill", prefill), ("decode", decode)):
            new = self._directory / f"{role}.new"
            new.write_text("\n".join(faults), encoding="utf-8")
            os.replace(new, self.path(role))


@dataclass(frozen=True)
class FaultyPair:
    """The running pair: its processes, URLs and faults."""

    processes: Pair
    prefill_url: str
    decode_url: str
    faults: FaultFiles


@contextmanager
def faulty_pair(
    name: str, signals: StopSignals, *, prefill: Sequence[str] = (), decode: Sequence[str] = ()
) -> Iterator[FaultyPair]:
    """A pair that serves, with more options for either process; logs are named after ``name``.

    Raises :class:`PairFailed` if it does not come up.
    """
    bootstrap, prefill_port, decode_port = free_ports(3)
    LOGS.mkdir(exist_ok=True)
    with ExitStack() as stack:
        files = FaultFiles(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{name}-"))))
        commands = {
            "prefill": ["--port", str(prefill_port), "--bootstrap-port", str(bootstrap), *prefill],
            "decode": ["--port", str(decode_port), "--prefill", f"{HOST}:{bootstrap}", *decode],
        }
        common = ["--host", HOST, "--log-level", "error"]
        pair = Pair(
            [
                Process(
                    role,
                    [str(BIN / f"launch_{role}"), *options, *common, "--fault", f"@{files.path(role)}"],
                    LOGS / f"{name}-{role}.log",
                )
                for role, options in commands.items()
            ],
            signals,
        )
        stack.callback(pair.stop)
        urls = [f"http://{HOST}:{port}" for port in (prefill_port, decode_port)]
        pair.start()
        with httpx.Client(trust_env=False) as client:
            wait_ready(pair, client, urls[0], urls[1], READY_TIMEOUT_S)
        yield FaultyPair(pair, urls[0], urls[1], files)
