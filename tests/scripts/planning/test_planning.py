"""The plan on paper: published sizes, and the numbers that the nodes themselves have."""

from __future__ import annotations

from pathlib import Path

import pytest
from planning.main import main, paper_of, parse_args
from planning.paper import ROW_FORMATS, Paper

from server.node.options import BUNDLED_MODEL

MIB = 1 << 20
PUBLISHED = {
    1000: ((20.6, 15.3), (30.3, 22.9)),
    4096: ((32.8, 18.6), (46.8, 26.6)),
    8191: ((70.1, 44.15), (101.5, 64.3)),
    65536: ((435.9, 244.2), (623.8, 349.5)),
    1048575: ((6896, 3864), (9873, 5533)),
}
"""MiB to hand over after so many tokens, with a NextN draft: Flash in bf16 and fp8, Pro in bf16 and fp8."""
ROW_AND_KEY = ((1024, 256), (584, 132), (584, 68))
"""Bytes of a row and of an index key in each of ``ROW_FORMATS``."""
HEADER = 512
"""Of the hand-off row, before its streams."""


def paper(*options: str) -> Paper:
    return paper_of(parse_args(options))


def by_hand(layers: tuple[int, int, int], hidden: int, n: int, row: int, key: int) -> int:
    """Bytes of the state after ``n`` tokens, by kind of layer: window only, CSA, HCA."""
    window_only, csa, hca = layers
    window = row * min(n, 127)
    of_csa = window + (row + key) * (n // 4) + 20480 * (n >= 4) + 10240 * (n % 4)
    of_hca = window + row * (n // 128) + 4096 * (n % 128)
    draft = row * min(n - 1, 127) + 4 * hidden * 2
    return window_only * window + csa * of_csa + hca * of_hca + draft + HEADER


@pytest.mark.parametrize("n", [1, 3, 4, 127, 128, 129, *PUBLISHED])
@pytest.mark.parametrize(
    ("config", "column", "layers", "hidden"), [("flash", 0, (2, 21, 20), 4096), ("pro", 1, (0, 30, 31), 7168)]
)
def test_hand_offs_are_as_large_as_they_must_be(
    config: str, column: int, layers: tuple[int, int, int], hidden: int, n: int
) -> None:
    plan = paper("--config", config)
    found = [plan.handoff_nbytes(rows, n) for rows in ROW_FORMATS]
    assert found == [by_hand(layers, hidden, n, row, key) for row, key in ROW_AND_KEY]
    for nbytes, mib in zip(found, PUBLISHED[n][column] if n in PUBLISHED else (), strict=False):
        assert nbytes / MIB == pytest.approx(mib, abs=0.5 if n > 100_000 else 0.05)


@pytest.mark.parametrize(("config", "layers", "hidden"), [("flash", (2, 21, 20), 4096), ("pro", (0, 30, 31), 7168)])
def test_a_snapshot_is_what_a_hand_off_has_in_the_slot(config: str, layers: tuple[int, int, int], hidden: int) -> None:
    """Without the hand-off row's head. At a page's end no group is open."""
    plan = paper("--config", config)
    for rows, (row, key) in zip(ROW_FORMATS, ROW_AND_KEY, strict=True):
        pages = plan.node(rows).page_nbytes * 4
        assert plan.snapshot_nbytes(rows) == by_hand(layers, hidden, 1024, row, key) - pages - HEADER


def test_the_document_of_prefix_reuse_has_the_sizes_of_the_nodes() -> None:
    text = (Path(__file__).parents[3] / "docs" / "prefix-reuse.md").read_text(encoding="utf-8")
    bundled = paper("--config", str(BUNDLED_MODEL), "--dtype", "float32")
    plans = [("Flash", paper("--config", "flash")), ("Pro", paper("--config", "pro"))]
    lines = [("bundled", bundled, ROW_FORMATS[0], "float32")]
    lines += [
        (name, plan, rows, said)
        for name, plan in plans
        for rows, said in zip(ROW_FORMATS[:2], ("bf16", "fp8"), strict=True)
    ]
    for name, plan, rows, said in lines:
        page, snapshot = plan.node(rows).page_nbytes, plan.snapshot_nbytes(rows)
        assert f"| {name} | {said} | {page:,} B | {snapshot:,} B | {snapshot / page:.1f} |" in text


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
        (
            ["--config", "flash", "--context", "1048577"],
            "--context 1,048,577: max_position_embeddings allows 1,048,576",
        ),
        (["--config", "flash", "--tokens", "9", "1048576"], "--tokens 1,048,576: max_position_embeddings allows"),
        (["--config", "flash", "--page-size", "100"], "page size 100 is not a multiple of c128_kv's 128"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys: pytest.CaptureFixture[str], options: list[str], words: str) -> None:
    assert main(options) == 2
    assert words in capsys.readouterr().err


def test_what_a_config_does_not_allow_is_not_planned_unasked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(BUNDLED_MODEL)]) == 0
    report = capsys.readouterr().out
    assert "8 requests of 8,192 tokens" in report
    assert report.splitlines()[-1].startswith("8,191 ")


@pytest.mark.parametrize("rate", ["0", "0GB/s", "25GBit/s", "fast"])
def test_a_wire_without_a_rate_is_refused(capsys: pytest.CaptureFixture[str], rate: str) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--config", "flash", "--wire", rate])
    assert f"argument --wire: '{rate}' is no rate, such as 25GB/s" in capsys.readouterr().err
