"""scripts/bench.py: rates and ratios, and a whole small run with real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark.measurement import BenchFailed, Measurement, Stream, decode_rate

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench.py"


def stream(*times_s: float) -> Stream:
    return Stream(list(times_s), list(range(1, len(times_s) + 1)))


def test_a_rate_counts_tokens_after_the_first_one() -> None:
    assert decode_rate([stream(10.0, 10.5, 11.0)]) == pytest.approx(2.0)


def test_a_rate_counts_only_while_all_requests_decode() -> None:
    early, late = stream(0.0, 1.0, 2.0, 3.0), stream(1.5, 2.0, 3.0, 4.0, 5.0)
    assert decode_rate([early, late]) == pytest.approx((2 + 2) / 1.5)


def test_several_tokens_may_come_at_once() -> None:
    assert decode_rate([Stream([0.0, 1.0, 2.0], [1, 4, 9])]) == pytest.approx(4.0)


def test_requests_that_never_decode_at_once_have_no_rate() -> None:
    with pytest.raises(BenchFailed, match="--decode-tokens"):
        decode_rate([stream(0.0, 1.0), stream(2.0, 3.0)])


def test_a_ratio_is_that_of_medians() -> None:
    measurement = Measurement("speed", "tokens/s", (("a", "b"),))
    for a, b in ((1.0, 10.0), (4.0, 2.0), (100.0, 1.0)):
        measurement.add("a", a)
        measurement.add("b", b)
    assert measurement.ratio("a", "b") == 2.0
    assert measurement.as_json()["ratios"] == {"a / b": 2.0}
    assert measurement.as_json()["variants"]["a"] == {
        "median": 4.0,
        "min": 1.0,
        "max": 100.0,
        "values": [1.0, 4.0, 100.0],
    }


@pytest.mark.timeout(300)
def test_a_quick_run_measures_everything(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--output", str(report)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    measurements = {m["name"]: m for m in json.loads(report.read_text())["measurements"]}
    assert {name.partition(",")[0] for name in measurements} == {"decode", "prefill", "hand-off"}
    for name, m in measurements.items():
        assert all(value > 0 for variant in m["variants"].values() for value in variant["values"]), name
        assert name in done.stdout
    (hand_off,) = (m for name, m in measurements.items() if name.startswith("hand-off"))
    assert set(hand_off["ratios"]) == {
        "TTFT PD / TTFT local",
        "hand-off / raw write",
        "digests / hand-off",
        "digests / TTFT PD",
    }
