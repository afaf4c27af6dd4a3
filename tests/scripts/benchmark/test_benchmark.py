"""scripts/bench.py: rates, ratios, the pace of slow variants, and whole small runs with real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark import startup
from benchmark.checkpoints import Checkpoints
from benchmark.in_process import decode_round, tokens_that_fit
from benchmark.main import PARTS, parse_args
from benchmark.measurement import BenchFailed, Measurement, Prompt, Stream, decode_rate, n_beyond, percentile
from benchmark.prefix import Fresh
from benchmark.servers import build_kernels, without_prefixes
from benchmark.session import Pace, Prompts, Session, Sizes
from benchmark.startup import measure_startup
from cluster import Node

from server.node.options import BUNDLED_MODEL

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench.py"


def stream(*times_s: float) -> Stream:
    return Stream(list(times_s), list(range(1, len(times_s) + 1)))


def measurement(*ratios: tuple[str, str]) -> Measurement:
    return Measurement("part", "speed", "tokens/s", ratios)


def test_a_rate_counts_tokens_after_the_first_one() -> None:
    assert decode_rate([stream(10.0, 10.5, 11.0)]) == pytest.approx(2.0)


def test_a_rate_counts_only_while_all_requests_decode() -> None:
    early, late = stream(0.0, 1.0, 2.0, 3.0), stream(1.5, 2.0, 3.0, 4.0, 5.0)
    assert decode_rate([early, late]) == pytest.approx((2 + 2) / 1.5)


def test_several_tokens_may_come_at_once() -> None:
    assert decode_rate([Stream([0.0, 1.0, 2.0], [1, 4, 9])]) == pytest.approx(4.0)


def test_requests_that_never_decode_at_once_have_no_rate() -> None:
    with pytest.raises(BenchFailed, match="2 requests never decoded all at once"):
        decode_rate([stream(0.0, 1.0), stream(2.0, 3.0)])


def late_prompts(prompts: list[Prompt] | Any, n_tokens: int) -> list[Stream]:
    """Every request begins ten tokens after the one before it."""
    return [stream(*range(10 * i, 10 * i + n_tokens)) for i in range(len(prompts))]


def test_requests_decode_as_many_tokens_as_they_need_to_be_at_it_all_at_once() -> None:
    n = tokens_that_fit(late_prompts, [(1,)] * 16, round_s=0.0, most=64)
    assert n == 256
    assert decode_rate(late_prompts([(1,)] * 16, n)) == pytest.approx(16)


def test_requests_that_cannot_decode_all_at_once_are_named() -> None:
    with pytest.raises(BenchFailed, match="64 requests"):
        tokens_that_fit(late_prompts, [(1,)] * 64, round_s=0.0, most=8)


def test_a_round_that_is_too_short_is_tried_again_with_more_tokens() -> None:
    m, n_tokens = measurement(), {"late": 100}
    decode_round({"late": late_prompts}, [(1,)] * 16, n_tokens, m)
    assert n_tokens == {"late": 200}
    assert m.values["late"] == [pytest.approx(16)]


def test_gaps_are_those_within_the_window() -> None:
    assert stream(0.0, 1.0, 3.0, 6.0, 10.0).gaps_s(1.0, 6.0) == [2.0, 3.0]


@pytest.mark.parametrize(("percent", "value"), [(50, 50.0), (99, 99.0), (99.9, 100.0), (1, 1.0)])
def test_a_percentile_is_one_of_the_values(percent: float, value: float) -> None:
    assert percentile([float(n) for n in range(100, 0, -1)], percent) == value


def test_a_ratio_is_that_of_medians() -> None:
    m = measurement(("a", "b"), ("a", "never measured"))
    m.differences = (("a", "b"),)
    for a, b in ((1.0, 10.0), (4.0, 2.0), (100.0, 1.0)):
        m.add("a", a)
        m.add("b", b)
    assert m.ratio("a", "b") == 2.0
    assert m.as_json()["ratios"] == {"a / b": 2.0}
    assert m.as_json()["differences"] == {"a - b": 2.0}
    assert m.as_json()["variants"]["a"] == {"median": 4.0, "min": 1.0, "max": 100.0, "values": [1.0, 4.0, 100.0]}


def test_an_interval_is_that_of_the_rounds_ratios() -> None:
    m = measurement(("a", "b"))
    for ratio in (1.6, 1.1, 1.2, 1.3, 1.4, 1.5):
        m.add("a", ratio * 10)
        m.add("b", 10.0)
    assert m.as_json()["intervals"] == {"a / b": (1.1, 1.6)}
    for ratio in (0.1, 1.7, 1.8):
        m.add("a", ratio * 10)
        m.add("b", 10.0)
    assert m.interval("a", "b") == (1.1, 1.7), "the second of nine from either end"
    m.add("b", 10.0)
    assert m.interval("a", "b") is None, "rounds of one variant alone"


@pytest.mark.parametrize(("n_values", "n_outside"), [(0, 0), (5, 0), (6, 1), (8, 1), (9, 2), (20, 6)])
def test_so_many_values_are_left_out_at_either_end(n_values: int, n_outside: int) -> None:
    """As in any table of the sign test."""
    assert n_beyond(n_values) == n_outside


def test_fresh_prompts_share_no_page() -> None:
    fresh = Fresh(Prompts(BUNDLED_MODEL))
    prompts = [fresh.one(300) for _ in range(500)]
    assert len({prompt[:256] for prompt in prompts}) == len(prompts)


def test_a_checkout_is_told_to_keep_no_prefix_if_it_can(tmp_path: Path) -> None:
    assert without_prefixes(None) == ("--prefix-cache", "off")
    assert without_prefixes(tmp_path) == ()
    options = tmp_path / "server" / "node" / "options.py"
    options.parent.mkdir(parents=True)
    options.write_text("--pages")
    assert without_prefixes(tmp_path) == ()
    options.write_text("--prefix-cache")
    assert without_prefixes(tmp_path) == ("--prefix-cache", "off")


def session(**sizes: Any) -> Session:
    return Session(
        Sizes(**sizes), 1, Checkpoints(Path("unused")), None, lambda name: None, Prompts(BUNDLED_MODEL), ExitStack()
    )


def test_a_first_round_warms_up_and_does_not_count() -> None:
    found = session(rounds=3, seconds=1e6).measure(measurement(), rounds_of(iter([100.0, 1.0, 2.0, 3.0])))
    assert found.values == {"a": [1.0, 2.0, 3.0]}


def test_a_first_round_that_takes_too_long_counts_and_is_the_only_one() -> None:
    found = session(rounds=3, seconds=0.0).measure(measurement(), rounds_of(iter([100.0, 1.0])))
    assert found.values == {"a": [100.0]}


def rounds_of(values: Any) -> Any:
    def one_round(m: Measurement) -> None:
        m.add("a", next(values))

    return one_round


def test_no_first_start_of_a_checkout_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles and reads from the disk what the second one finds; a ratio to it would be of that."""
    started: set[tuple[bool, str]] = set()

    def start_s(nodes: Sequence[Node]) -> float:
        programs = {("PYTHONPATH=baseline" in node.command, node.role) for node in nodes}
        is_first = not programs <= started
        started.update(programs)
        return 100.0 if is_first else 1.0

    monkeypatch.setattr(startup, "_start_s", start_s)
    (m,) = measure_startup(replace(session(rounds=2, seconds=0.0), baseline=Path("baseline")))
    assert list(m.values.values()) == [[1.0, 1.0]] * 6


def test_a_variant_that_would_take_too_long_is_left_out_with_a_note() -> None:
    pace, m = Pace(10.0), measurement()
    pace.took("slow", 512, 5.0)
    pace.took("fast", 512, 0.1)
    assert pace.possible(m, {"slow": 1, "fast": 2, "new": 3}, 2048) == {"fast": 2, "new": 3}
    assert m.notes == {"slow": "not measured: 2,048 tokens would take 20 s or more; see --seconds"}


def test_a_variant_is_not_tried_beyond_its_length() -> None:
    m = measurement()
    assert Pace(10.0, {"a": 4096}).possible(m, {"a": 1}, 8000) == {}
    assert m.notes == {"a": "not measured beyond 4,096 tokens"}


def test_prompts_of_one_batch_differ() -> None:
    prompts = Prompts(BUNDLED_MODEL).many(64, 64)
    assert len(set(prompts)) == 64
    assert {len(prompt) for prompt in prompts} == {64}


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["--rounds", "0"],
        ["--seconds", "-1"],
        ["--baseline", "nowhere"],
        ["decode", "--write-readme"],
        ["--quick", "--write-readme"],
    ],
)
def test_what_cannot_be_done_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(words)
    assert ended.value.code == 2
    assert words[0].lstrip("-").replace("decode", "parts").replace("quick", "--quick") in capsys.readouterr().err


def quick_run(report: Path, *parts: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *parts, "--quick", "--output", str(report)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(report.read_text())["measurements"]
    assert {m["part"] for m in found} == set(parts)
    for m in found:
        assert m["variants"], m["name"]
        assert all(value > 0 for variant in m["variants"].values() for value in variant["values"]), m["name"]
    return found


@pytest.mark.processes
def test_engine_and_transformers_are_measured_in_one_run(tmp_path: Path) -> None:
    found = quick_run(tmp_path / "report.json", "decode", "prefill")
    ratios = {name for m in found for name in m["ratios"]}
    assert ratios >= {"engine / transformers", "engine / roofline"}
    assert {(m["size"]["checkpoint"], m["size"]["dtype"]) for m in found} == {
        ("bundled", "float32"),
        ("medium", "float32"),
        ("medium", "bfloat16"),
        ("flash", "float32"),
    }


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_one_pair_and_one_node_serve_several_parts(tmp_path: Path) -> None:
    found = quick_run(tmp_path / "report.json", "http", "ttft", "itl", "growth")
    assert all("PD / local" in m["ratios"] for m in found)
    (last,) = (m for m in found if m["part"] == "growth" and m["size"]["tokens"] == 128)
    assert last["details"]["moved_nbytes"] > 0
    assert set(last["details"]["step_ms"]) == {"PD", "local"}


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_a_pair_that_keeps_prefixes_sends_less_of_them(tmp_path: Path) -> None:
    found = quick_run(tmp_path / "report.json", "prefix")
    sent = [m for m in found if m["unit"] == "bytes"]
    assert len(sent) == 2
    assert all(m["ratios"]["cache / off"] < 1 for m in sent)
    assert all("cache / off" in m["ratios"] for m in found)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_whole_run_measures_every_part(tmp_path: Path) -> None:
    found = quick_run(tmp_path / "report.json", *PARTS)
    assert any("hand-off / raw write" in m["ratios"] for m in found)


def a_checkout(root: Path, build: str) -> Path:
    """A baseline whose kernels are built by the program ``build``."""
    kernels = root / "server" / "kernels"
    kernels.mkdir(parents=True)
    for folder in (root / "server", kernels):
        (folder / "__init__.py").touch()
    (kernels / "build.py").write_text(build)
    return root


def test_the_kernels_of_a_baseline_are_its_own_and_built(tmp_path: Path) -> None:
    build_kernels(a_checkout(tmp_path, "from pathlib import Path\nPath(__file__).with_name('built').touch()"))
    assert (tmp_path / "server" / "kernels" / "built").exists()


def test_a_baseline_whose_kernels_cannot_be_built_is_not_measured(tmp_path: Path) -> None:
    baseline = a_checkout(tmp_path, "raise SystemExit('no g++ here')")
    with pytest.raises(BenchFailed, match="kernels of --baseline cannot be built: no g\\+\\+ here"):
        build_kernels(baseline)


def test_a_baseline_without_kernels_is_measured_as_it_is(tmp_path: Path) -> None:
    build_kernels(tmp_path)
