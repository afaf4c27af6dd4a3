"""Numbers of bytes in words: ``12GiB`` on a command line, ``1.5 GiB`` in a message."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{kind}B": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for kind, base in (("", 1000), ("i", 1024))
}
_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def nbytes_of(text: str) -> int:
    """Bytes of ``500MB``, ``1.5GiB`` or ``4096``; ``k`` and ``K`` are the same. Raises :class:`ValueError`."""
    match = _PATTERN.fullmatch(text.strip())
    unit = match[2] if match else "?"
    unit = unit[:1].upper() + unit[1:]
    if match is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is no number of bytes, such as 500MB, 1.5GiB or 4096")
    return int(float(match[1]) * _UNITS[unit])


def size(nbytes: float) -> str:
    """``1.5 GiB``, ``20 MiB``, ``512 B``."""
    for unit, factor, digits in (("TiB", 1 << 40, 2), ("GiB", 1 << 30, 1), ("MiB", 1 << 20, 0), ("KiB", 1 << 10, 0)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.{digits}f} {unit}"
    return f"{nbytes:.0f} B"
