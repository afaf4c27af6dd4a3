"""Reads weight files from end to end, once: their bytes go where they are wanted, and into the file's digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from server.model.fields import CheckpointError

BLOCK_NBYTES = 4 << 20
"""Bytes that are read, hashed and converted at a time: they stay in the processor's cache meanwhile."""

OnProgress = Callable[[int, int], None]
"""Is told how many bytes have been read so far, and of how many."""


class ByteCount:
    """Counts the bytes of several files for ``on_progress``."""

    def __init__(self, total: int, on_progress: OnProgress | None) -> None:
        self._done, self._total, self._on_progress = 0, total, on_progress

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)


class FileReader:
    """One file, read in order. What is read raises :class:`CheckpointError` if the file ends before, or fails."""

    def __init__(self, file: Path, count: ByteCount) -> None:
        self._file, self._count = file, count
        self._stream = file.open("rb", buffering=0)
        self._digest = xxhash.xxh3_128()
        self._scratch = memoryview(bytearray(0))
        self.position = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def read_into(self, buffer: memoryview, what: str) -> None:
        """Fills ``buffer`` (bytes, writable) with the next bytes; ``what`` they are is for errors."""
        for start in range(0, len(buffer), BLOCK_NBYTES):
            block = buffer[start : start + BLOCK_NBYTES]
            self._fill(block, what)
            self._digest.update(block)
            self.position += len(block)
            self._count.add(len(block))

    def skip_to(self, position: int, what: str) -> None:
        """Reads on to ``position`` for the digest alone."""
        if self.position < position and not self._scratch:
            self._scratch = memoryview(bytearray(BLOCK_NBYTES))
        while self.position < position:
            self.read_into(self._scratch[: min(position - self.position, BLOCK_NBYTES)], what)

    def end(self) -> str:
        """xxh3_128, in hex, over the whole file; it must end here."""
        if self._stream.read(1):
            raise CheckpointError(f"{self._file} has become longer while it was read")
        return self._digest.hexdigest()

    def _fill(self, block: memoryview, what: str) -> None:
        while block:
            try:
                n = self._stream.readinto(block)
            except OSError as error:
                raise CheckpointError(f"{self._file}: {what} cannot be read: {error}") from error
            if not n:
                raise CheckpointError(f"{self._file} has become shorter while it was read: it ends within {what}")
            block = block[n:]
