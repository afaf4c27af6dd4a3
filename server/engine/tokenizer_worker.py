"""The other process, which tokenizes long texts: :mod:`server.engine.tokenizer_process` starts this file and kills it.

It is run by its path and imports nothing of ours, so that it starts in a few hundredths of a second and stays small.
A frame is a kind (one byte), a length (8 bytes) and that many bytes. In comes the tokenizer's JSON, then texts in UTF-8
(kind ``S`` with special tokens, ``P`` without). Out go, with the process's resident bytes first (8 bytes), ids of 4
bytes each, little endian (kind ``I``), or why there are none (kind ``E``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from array import array
from typing import BinaryIO

from tokenizers import Tokenizer

HEADER = struct.Struct("<cQ")
RESIDENT = struct.Struct("<Q")
WITH_SPECIAL_TOKENS, WITHOUT_SPECIAL_TOKENS, IDS, ERROR = b"S", b"P", b"I", b"E"
_PR_SET_PDEATHSIG = 1


def main() -> None:
    _end_with(int(sys.argv[1]))
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    frame = _read(source)
    if frame is None:
        return
    tokenizer = Tokenizer.from_str(frame[1].decode())
    del frame
    _write(sink, IDS, b"")
    while (frame := _read(source)) is not None:
        kind, text = frame
        try:
            encoding = tokenizer.encode_batch_fast([text.decode()], add_special_tokens=kind == WITH_SPECIAL_TOKENS)[0]
            ids = array("I", encoding.ids)
            if sys.byteorder == "big":
                ids.byteswap()
            _write(sink, IDS, ids.tobytes())
        except Exception as error:  # noqa: BLE001 - sent to the caller; the next text is another
            _write(sink, ERROR, repr(error).encode("utf-8", "replace")[:1000])


def _end_with(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends, even amid a text, and looks whether it has already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _read(source: BinaryIO) -> tuple[bytes, bytes] | None:
    """The next frame; None at the end of the pipe."""
    header = source.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    kind, nbytes = HEADER.unpack(header)
    content = source.read(nbytes)
    return (kind, content) if len(content) == nbytes else None


def _write(sink: BinaryIO, kind: bytes, content: bytes) -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    sink.write(HEADER.pack(kind, RESIDENT.size + len(content)) + RESIDENT.pack(resident))
    sink.write(content)
    sink.flush()


if __name__ == "__main__":
    main()
