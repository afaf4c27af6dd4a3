"""Tokenizing in another process, which can be killed: what a library call in a thread cannot be."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from server.engine.tokenizer_worker import ERROR, HEADER, RESIDENT, WITH_SPECIAL_TOKENS, WITHOUT_SPECIAL_TOKENS
from server.failure import Failure, RequestFailed

log = logging.getLogger(__name__)

WORKER = Path(__file__).with_name("tokenizer_worker.py")
COMMAND = (sys.executable, "-P", str(WORKER))  # -P: the modules beside the worker do not hide those of the library
MAX_GROWTH_NBYTES = 64 << 20
"""A process that has grown by more, since it was ready, ends after its job: the allocator keeps what it once had."""
_END_S = 5.0


@dataclass(eq=False)
class EncodingJob:
    """Texts to tokenize in one go. Set ``cancelled`` from any thread: nobody waits for the ids any more."""

    texts: Sequence[str]
    add_special_tokens: bool = True
    cancelled: bool = False


class TokenizerProcess:
    """One worker process, started when it is needed; ``settings`` is the tokenizer's JSON.

    A process that dies fails the job it had (503 ``tokenizer_died``), and the next job gets another process. It holds
    no lock of the interpreter here, and it ends with this object, if nobody closes it, and with this process, however
    that ends.
    """

    def __init__(
        self, settings: str, *, command: Sequence[str] = COMMAND, max_growth_nbytes: int = MAX_GROWTH_NBYTES
    ) -> None:
        self._settings = settings
        self._command = command
        self._max_growth_nbytes = max_growth_nbytes
        self._lock = threading.Lock()  # held for moments only: the event loop takes it to cancel
        self._process: subprocess.Popen[bytes] | None = None
        self._job: EncodingJob | None = None
        """The current job; to cancel it is to kill the process."""
        self._unclosed: weakref.finalize[..., TokenizerProcess] | None = None
        self._is_ready = False
        self._ready_nbytes = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id; None while there is none."""
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Makes ready now what :meth:`encode` would else start."""
        self.encode(EncodingJob(()))

    def encode(self, job: EncodingJob) -> list[list[int]]:
        """Ids of each text, with special tokens where the job asks for them. Blocking: for a thread of its own.

        Raises :class:`RequestFailed`: the process ended, or the job is cancelled.
        """
        try:
            return self._encode(job)
        finally:
            with self._lock:
                was_killed = job.cancelled and self._job is job
                self._job = None
            if was_killed and (process := self._process) is not None:
                self._end(process)  # perhaps only behind its last answer

    def _encode(self, job: EncodingJob) -> list[list[int]]:
        process = self._running(job)
        try:
            if not self._is_ready:
                self._ready_nbytes, _ = _ask(process, WITH_SPECIAL_TOKENS, self._settings)
                self._is_ready = True
            kind = WITH_SPECIAL_TOKENS if job.add_special_tokens else WITHOUT_SPECIAL_TOKENS
            resident, ids = 0, []
            for text in job.texts:
                resident, content = _ask(process, kind, text)
                ids.append(_ids(content))
        except (OSError, EOFError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            self._end(process)
            if job.cancelled:
                raise _cancelled() from error
            code = process.returncode
            log.warning("the tokenizing process ended with exit code %d: the next text starts another", code)
            reason = f"the process that tokenized this prompt has ended (exit code {code}); the next gets another"
            raise RequestFailed(Failure("tokenizer_died", reason)) from error
        if resident > self._ready_nbytes + self._max_growth_nbytes:
            self._end(process)
        return ids

    def cancel(self, job: EncodingJob) -> None:
        """Ends ``job`` by ending the process; the next job starts another. May be called from any thread."""
        with self._lock:
            job.cancelled = True
            if self._process is not None and self._job is job:
                self._process.kill()

    def close(self) -> None:
        if (process := self._process) is not None:
            self._end(process)

    def _running(self, job: EncodingJob) -> subprocess.Popen[bytes]:
        """The process, started if there is none; a job that was cancelled before gets none."""
        dead = self._process
        if dead is not None and dead.poll() is not None:
            self._end(dead)
        with self._lock:
            if job.cancelled:
                raise _cancelled()
            self._job = job
            if self._process is not None:
                return self._process
            try:
                self._process = subprocess.Popen(
                    [*self._command, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
                    start_new_session=True,  # a Ctrl-C in the terminal is for the node, which ends it
                )
            except OSError as error:
                reason = f"no process can be started to tokenize a long prompt: {error}"
                raise RequestFailed(Failure("tokenizer_died", reason)) from error
            self._unclosed = weakref.finalize(self, _kill, self._process)
            self._is_ready = False
            return self._process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            process.kill()
            if self._process is process:
                self._process = None
                if self._unclosed is not None:
                    self._unclosed.detach()
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(_END_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was still to be written reaches nobody
                pipe.close()


def utf8_of(text: str) -> bytes:
    """:raises RequestFailed: 400 ``invalid_text`` for a lone surrogate, which no tokenizer can take."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestFailed(
            Failure("invalid_text", f"The text has a lone surrogate at character {error.start}: it is not Unicode.")
        ) from error


def _ask(process: subprocess.Popen[bytes], kind: bytes, text: str) -> tuple[int, bytes]:
    """Resident bytes and content of the answer to one frame.

    Raises :class:`EOFError` or :class:`OSError` if the process has ended, :class:`RequestFailed` for its refusal.
    """
    if process.stdin is None or process.stdout is None:
        raise EOFError
    content = utf8_of(text)
    process.stdin.write(HEADER.pack(kind, len(content)))
    process.stdin.write(content)
    process.stdin.flush()
    kind, nbytes = HEADER.unpack(_read(process.stdout, HEADER.size))
    (resident,) = RESIDENT.unpack(_read(process.stdout, RESIDENT.size))
    answer = _read(process.stdout, nbytes - RESIDENT.size)
    if kind == ERROR:
        reason = answer.decode("utf-8", "replace")
        raise RequestFailed(Failure("invalid_text", f"The tokenizer refused the text: {reason}"))
    return resident, answer


def _read(source: IO[bytes], nbytes: int) -> bytes:
    content = source.read(nbytes)
    if len(content) < nbytes:
        raise EOFError
    return content


def _ids(content: bytes) -> list[int]:
    ids = array("I", content)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _cancelled() -> RequestFailed:
    return RequestFailed(Failure("aborted", "nobody waits for this prompt any more"))
