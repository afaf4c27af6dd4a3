from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from server.engine.tokenizer import Tokenizer
from server.engine.tokenizer_process import COMMAND, EncodingJob, TokenizerProcess
from server.failure import RequestFailed
from server.node.options import BUNDLED_MODEL

WITHIN_S = 30.0
STUCK = "import sys, time\nsys.stdin.buffer.read(1)\nprint('began', file=sys.stderr, flush=True)\ntime.sleep(600)"
"""A worker that takes its tokenizer and never answers."""


@pytest.fixture
def process(tokenizer: Tokenizer) -> Iterator[TokenizerProcess]:
    process = tokenizer.process()
    yield process
    process.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


TEXTS = ["", "Tom has 12 apples", "schöne 🦊 日本\x00", "a" * 100_000]


def test_ids_are_those_of_the_tokenizer_itself(tokenizer: Tokenizer, process: TokenizerProcess) -> None:
    assert process.encode(EncodingJob(TEXTS)) == [tokenizer.encode(text) for text in TEXTS]
    rendered = process.encode(EncodingJob(TEXTS, add_special_tokens=False))
    assert rendered == [tokenizer.encode_rendered(text) for text in TEXTS]


def test_it_is_started_once_and_imports_nothing_of_ours(process: TokenizerProcess) -> None:
    process.start()
    pid = process.pid
    assert pid is not None
    process.encode(EncodingJob(["x"]))
    assert process.pid == pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert "tokenizers" in maps
    assert "libtorch" not in maps


def test_a_dead_process_fails_its_own_job_and_the_next_gets_another(tokenizer: Tokenizer) -> None:
    dying = TokenizerProcess("", command=(sys.executable, "-c", "import sys; sys.stdin.buffer.read(1); sys.exit(3)"))
    with pytest.raises(RequestFailed, match="exit code 3") as failure:
        dying.encode(EncodingJob(["x"]))
    assert (failure.value.code, failure.value.kind) == ("tokenizer_died", "unavailable")
    process = tokenizer.process()
    process.start()
    assert process.pid is not None
    pid = process.pid
    os.kill(pid, 9)
    until(lambda: not is_running(pid))
    assert process.encode(EncodingJob(["x"])) == [tokenizer.encode("x")]
    process.close()


def test_a_cancelled_job_ends_the_process_and_its_caller(tokenizer: Tokenizer) -> None:
    process = TokenizerProcess("", command=(sys.executable, "-c", STUCK))
    job, ended = EncodingJob(["x"]), []

    def work() -> None:
        with pytest.raises(RequestFailed) as failure:
            process.encode(job)
        ended.append(failure.value.code)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: process.pid is not None)
    pid = process.pid
    assert pid is not None
    process.cancel(job)
    thread.join(WITHIN_S)
    assert ended == ["aborted"]
    assert not is_running(pid)
    with pytest.raises(RequestFailed):
        process.encode(job)  # cancelled before it began: no process for it
    assert process.pid is None


def test_memory_goes_back_after_a_long_text(tokenizer: Tokenizer) -> None:
    process = tokenizer.process()
    pids = []
    for text in ("a" * 500_000, "a"):
        process.encode(EncodingJob([text]))
        pids.append(process.pid)
    assert pids[0] is None, "it has grown by more than its limit, and has ended"
    assert pids[1] is not None
    process.close()


def test_a_text_that_is_no_unicode_is_a_400_and_costs_no_process(
    tokenizer: Tokenizer, process: TokenizerProcess
) -> None:
    process.start()
    pid = process.pid
    with pytest.raises(RequestFailed, match="surrogate at character 1") as failure:
        process.encode(EncodingJob(["a\ud800"]))
    assert (failure.value.code, failure.value.kind) == ("invalid_text", "request")
    assert process.encode(EncodingJob(["x"])) == [tokenizer.encode("x")]
    assert process.pid == pid


def test_what_cannot_be_started_is_a_503() -> None:
    process = TokenizerProcess("", command=("/nowhere/python",))
    with pytest.raises(RequestFailed, match="/nowhere/python") as failure:
        process.encode(EncodingJob(["x"]))
    assert (failure.value.code, failure.value.kind) == ("tokenizer_died", "unavailable")


def test_it_ends_with_the_process_that_started_it() -> None:
    code = (
        "import subprocess, sys, os, time\n"
        f"child = subprocess.Popen([*{COMMAND!r}, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "from pathlib import Path\n"
        f"text = Path({str(BUNDLED_MODEL / 'tokenizer.json')!r}).read_bytes()\n"
        "child.stdin.write(b'S' + len(text).to_bytes(8, 'little') + text); child.stdin.flush()\n"
        "child.stdout.read(17)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    os.kill(pid, signal.SIGSTOP)  # as amid a long text, it does not see the end of its pipe
    parent.kill()
    parent.wait()
    until(lambda: not is_running(pid))
    parent.stdout.close()


def test_a_job_that_is_over_ends_nothing_when_it_is_cancelled(process: TokenizerProcess) -> None:
    """The client leaves just as its ids are there; the next job has the process by then."""
    over = EncodingJob(["Tom"])
    process.encode(over)
    pid = process.pid
    process.cancel(over)
    assert process.encode(EncodingJob(["Tom"]))
    assert process.pid == pid


def test_a_process_that_nobody_closes_ends_with_its_owner(tokenizer: Tokenizer) -> None:
    process = tokenizer.process()
    process.start()
    pid = process.pid
    assert pid is not None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        del process
        gc.collect()
    assert [str(warning.message) for warning in warned] == []
    assert not is_running(pid)
