"""Numbers of bytes in words, read and written."""

from __future__ import annotations

import pytest

from server.sizes import nbytes_of, size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("500MB", 500_000_000),
        ("1.5GiB", 3 << 29),
        ("2 gib", 2 << 30),
        ("7KB", 7000),
        ("1TiB", 1 << 40),
        ("3B", 3),
        ("25gB", 25_000_000_000),
    ],
)
def test_sizes_are_read_in_powers_of_ten_and_of_two(text: str, nbytes: int) -> None:
    assert nbytes_of(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "12 apples", "-3GB", "1e9", "0x10", "nan", "1.5", "0.8B"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no number of bytes, such as 500MB, 1\.5GiB or 4096"):
        nbytes_of(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (20 << 20, "20 MiB"), (3 << 29, "1.5 GiB"), (805 << 30, "805.0 GiB")],
)
def test_sizes_are_written_in_powers_of_two(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
