"""The plan on paper: published sizes, and the numbers that the nodes themselves have."""

from __future__ import annotations

import pytest
from planning.main import main, paper_of, parse_args
from planning.paper import ROW_FORMATS, Paper

from server.node.options import BUNDLED_MODEL

MIB = 1 << 20
PUBLISHED = {
    1000: ((20.6, 15.3), (30.3, 22.9)),
    4096: ((32.8, 18.6), (46.8, 26.6)),
    8191: ((70.1, 44.2), (101.5, 64.3)),
    65536: ((435.9, 244.2), (623.8, 349.5)),
    1048575: ((6896, 3864), (9873, 5533)),
}
"""MiB to hand over after so many tokens, with a NextN draft: Flash in bf16 and fp8, Pro in bf16 and fp8. In fp8 a row
has 584 bytes and an index key 132.
"""


def paper(*options: str) -> Paper:
    return paper_of(parse_args(options))


@pytest.mark.parametrize("n", PUBLISHED)
@pytest.mark.parametrize(("config", "column"), [("flash", 0), ("pro", 1)])
def test_hand_offs_are_as_large_as_published(config: str, column: int, n: int) -> None:
    plan = paper("--config", config)
    found = [plan.handoff_nbytes(rows, n) / MIB for rows in ROW_FORMATS[:2]]
    digits = 0 if n > 100_000 else 1
    assert tuple(round(each, digits) for each in found) == PUBLISHED[n][column]


def test_mxfp4_keys_save_64_bytes_a_key() -> None:
    plan = paper("--config", "flash")
    fp8, mxfp4 = (plan.handoff_nbytes(rows, 4096) for rows in ROW_FORMATS[1:])
    assert fp8 - mxfp4 == 21 * (132 - 68) * 1024


def test_the_report_has_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", "flash", "--context", "65536", "--slots", "4", "--wire", "25GB/s"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("43 layers (2 window only, 21 CSA, 20 HCA), a NextN draft, 0 tokens a step; bfloat16; 4 req")
    for words in ("c4_kv ", "handoff ", "dequantized ", "packed ", "fp8, keys mxfp4 ", "1,024 pages and 4 slots"):
        assert words in out, words
    row = next(line for line in out.splitlines() if line.startswith("65,536 "))
    assert row.split()[1:3] == ["435.9", "244.2"]
    assert float(row.split()[4]) == pytest.approx(435.9 * MIB / 25e9, abs=1e-4)


def test_slots_of_the_longest_context_have_their_pages() -> None:
    plan = paper("--config", "flash", "--context", "1048576", "--slots", "2", "--spec-tokens", "3").node(ROW_FORMATS[0])
    assert (plan.pages, plan.slots, plan.context) == (2 * 4097, 2, 1048576)


def test_a_checkpoint_directory_is_a_config_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(BUNDLED_MODEL), "--context", "2048", "--slots", "1", "--tokens", "300"]) == 0
    assert "300 " in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--config", "nowhere"], "there is no nowhere: give --config"),
        (["--config", "flash", "--page-size", "100"], "page size 100 is not a multiple of c4_kv"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert main(options) == 2
    assert words in capsys.readouterr().err
