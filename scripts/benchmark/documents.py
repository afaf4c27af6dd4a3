"""What a run writes into the project: docs/bench.json, and from it alone the picture and the README's table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cluster import ROOT

from .measurement import VERSION, Measurement, write_json
from .picture import Axis, Chart, decades, picture
from .report import shown

README, REPORT, PICTURE = ROOT / "README.md", ROOT / "docs" / "bench.json", ROOT / "docs" / "bench.svg"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"

Report = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Measurements of ``part`` that differ in one ``size``, as one row: the medians of ``variant``, and ratios."""

    part: str
    size: str
    size_unit: str
    variant: str
    ratios: tuple[str, ...]
    differences: tuple[str, ...] = ()


ROWS = (
    Row(
        "decode",
        "requests",
        "requests",
        "engine",
        ("engine / transformers", "engine / Python model", "engine / roofline"),
    ),
    Row("http", "requests", "requests", "PD", ("PD / transformers", "PD / local")),
    Row("prefill", "tokens", "tokens", "engine", ("engine / transformers", "engine / Python model")),
    Row("ttft", "tokens", "tokens", "PD", ("PD / local",), ("PD - local",)),
    Row("handoff", "tokens", "tokens", "hand-off", ("hand-off / raw write",)),
    Row("itl", "figure", "", "PD", ("PD / local",)),
    Row("growth", "tokens", "tokens", "PD", ("PD / local",)),
    Row("prefix", "figure", "", "cache", ("cache / off",)),
    Row("startup", "", "", "PD", ()),
)
TITLES = {
    "decode": "decode",
    "http": "decode over HTTP, PD",
    "prefill": "prefill",
    "ttft": "time to the first token, PD",
    "handoff": "hand-off",
    "itl": "inter-token latency while long prompts arrive, PD",
    "growth": "time to the first token, growth, PD",
    "prefix": "prefix reuse",
    "startup": "start-up of a pair, command to ready",
}


def write_documents(setting: Report, measurements: Sequence[Measurement]) -> None:
    """The report, the picture, and the table between the README's markers."""
    write_json(REPORT, setting, measurements)
    report = read_report()
    PICTURE.write_text(picture_of(report), encoding="utf-8")
    head, _, tail = parts_of_readme()
    README.write_text(f"{head}{BEGIN}\n\n{markdown(report)}\n\n{END}{tail}", encoding="utf-8")


def read_report() -> Report:
    """The committed report. Raises :class:`ValueError` for one of another version."""
    report: Report = json.loads(REPORT.read_text(encoding="utf-8"))
    if report["version"] != VERSION:
        raise ValueError(f"{REPORT} has version {report['version']}, expected {VERSION}: run scripts/bench.py again")
    return report


def parts_of_readme() -> tuple[str, str, str]:
    """What stands before, between and behind the markers. Raises :class:`ValueError` without them."""
    head, begin, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    content, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{README} has no {BEGIN} ... {END}")
    return head, content.strip(), tail


def markdown(report: Report) -> str:
    """The table, with machine and date."""
    lines = ["| what | of | median | ratios of medians |", "|---|---|---|---|"]
    for row in ROWS:
        groups: dict[str, list[Report]] = {}
        for m in report["measurements"]:
            if m["part"] == row.part and row.variant in m["variants"]:
                kind = ", ".join(m["size"][key] for key in ("checkpoint", "dtype") if key in m["size"])
                groups.setdefault(f"{kind}; {m['unit']}", []).append(m)
        lines += [_line(row, group) for group in groups.values()]
    lines += _speculation(report)
    setting = report["setting"]
    kernels = {m["details"]["kernels"] for m in report["measurements"] if "kernels" in m["details"]}
    threads = f"threads of one operation, in every process: {setting['threads']}"
    lines += [
        "",
        f"![growth with the prompt, and gaps between tokens]({PICTURE.relative_to(ROOT)})",
        "",
        f"{setting['machine']}, {setting['cpus']} CPUs; {threads}; {setting['date']}; "
        f"kernels {', '.join(sorted(kernels))}, torch {setting['torch']}, transformers {setting['transformers']}.",
    ]
    return "\n".join(lines)


def _line(row: Row, group: Sequence[Report]) -> str:
    first = group[0]
    kind = ", ".join(first["size"][key] for key in ("checkpoint", "dtype") if key in first["size"])
    title = TITLES[row.part] + (f"; {kind}" if kind else "")
    sizes = " / ".join(_size(m["size"].get(row.size, "")) for m in group) + f" {row.size_unit}"
    medians = " / ".join(shown(m["variants"][row.variant]["median"]) for m in group) + f" {first['unit']}"
    compared = [
        f"{name.replace(' - ', ' minus ')}: {' / '.join(_ratio(m[kind].get(name)) for m in group)}{unit}"
        for kind, names, unit in (("ratios", row.ratios, ""), ("differences", row.differences, f" {first['unit']}"))
        for name in names
        if any(name in m[kind] for m in group)
    ]
    return f"| {title} | {sizes.strip()} | {medians} | {'; '.join(compared)} |"


def _speculation(report: Report) -> list[str]:
    found = [m for m in report["measurements"] if m["part"] == "speculation"]
    lines = []
    for m in found:
        plain, *drafting = m["variants"]
        ratios = " / ".join(_ratio(m["ratios"].get(f"{name} / {plain}")) for name in drafting)
        lengths = " / ".join(f"{m['details']['accept_length'][name]:.2f}" for name in drafting)
        lines.append(
            f"| time per output token with drafts, engine; bundled questions, {m['size']['requests']} at once | "
            f"{' / '.join(m['variants'])} | {' / '.join(shown(v['median']) for v in m['variants'].values())} ms | "
            f"to {plain}: {ratios}; accept length {lengths} |"
        )
    return lines


def _size(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.2g}"


def picture_of(report: Report) -> str:
    """Two charts: what grows with the context, and gaps between tokens while long prompts arrive."""
    growth = [m for m in report["measurements"] if m["part"] == "growth" and m["variants"]]
    series: dict[str, list[tuple[float, float]]] = {}
    for m in growth:
        n = m["size"]["tokens"]
        for name, variant in m["variants"].items():
            series.setdefault(f"time to the first token, {name}, ms", []).append((n, variant["median"]))
        for name, step_ms in m["details"]["step_ms"].items():
            series.setdefault(f"one step of one request, {name}, ms", []).append((n, step_ms))
        if "moved_nbytes" in m["details"]:
            series.setdefault("state moved, MB", []).append((n, m["details"]["moved_nbytes"] / 1e6))
    ticks = [(float(m["size"]["tokens"]), _size(m["size"]["tokens"])) for m in growth]
    values = [y for points in series.values() for _, y in points]
    charts = [Chart("Growth with the prompt", Axis("prompt, tokens", ticks), Axis("", decades(values)), series)]
    for m in report["measurements"]:
        if "curve_ms" in m["details"]:
            charts.append(_curve(m))
    return picture(charts)


def _curve(m: Report) -> Chart:
    percent = m["details"]["curve_percent"]
    series = {  # tokens that came in one read have no gap, and no place on the axis
        name: [(p, gap) for p, gap in zip(percent, gaps, strict=True) if gap > 0]
        for name, gaps in m["details"]["curve_ms"].items()
    }
    values = [y for points in series.values() for _, y in points]
    ticks = [(float(p), f"{p}") for p in (1, 25, 50, 75, 90, 99, 99.9)]
    streams, prompt = m["size"]["streams"], m["size"]["prompt_tokens"]
    title = f"Gaps between tokens: {streams} streams, prompts of {prompt:,} tokens arriving"
    return Chart(title, Axis("percentile", ticks, float), Axis("ms", decades(values)), series)
