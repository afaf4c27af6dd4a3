"""Numbers of bytes in words: ``12GiB`` on a command line, ``1.5 GiB`` in a message."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{kind}b": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for kind, base in (("", 1000), ("i", 1024))
}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def nbytes_of(text: str) -> int:
    """Bytes of ``500MB``, ``1.5GiB`` or ``4096``, in capitals or not. Raises :class:`ValueError`."""
    match = _PATTERN.fullmatch(text.strip())
    factor = None if match is None else _UNITS.get(match[2].lower())
    if match is None or factor is None or (factor == 1 and "." in match[1]):
        raise ValueError(f"{text!r} is no number of bytes, such as 500MB, 1.5GiB or 4096")
    return int(float(match[1]) * factor)


def size(nbytes: float) -> str:
    """``1.5 GiB``, ``20 MiB``, ``512 B``."""
    for unit, factor, digits in (("TiB", 1 << 40, 2), ("GiB", 1 << 30, 1), ("MiB", 1 << 20, 0), ("KiB", 1 << 10, 0)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.{digits}f} {unit}"
    return f"{nbytes:.0f} B"
