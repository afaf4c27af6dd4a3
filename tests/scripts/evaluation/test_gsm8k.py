"""scripts/gsm8k.py against an endpoint on a real port: prompts, answers, gates and exit codes."""

from __future__ import annotations

import json
import socket
import threading
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from evaluation import gsm8k
from evaluation.client import Answer
from evaluation.questions import (
    DataError,
    Problem,
    chat_messages,
    completion_prompt,
    last_number,
    load_problems,
    marked_number,
    pick_shots,
)
from evaluation.report import Run, as_json, differences

from tests.scripts.evaluation.fake_endpoint import Script, serving


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Six questions whose answer is 4, of two kinds."""
    path = tmp_path / "test.jsonl"
    rows = [
        {
            "question": f"What is {i} and {4 - i} ?",
            "answer": f"{i} + {4 - i} = 4 #### 4",
            "kind": ("near", "far")[i % 2],
        }
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(data: Path, url: str, *more: str) -> int:
    return gsm8k.main(["--base-url", url, "--data", str(data), "--num-shots", "2", "--concurrency", "3", *more])


def report_of(data: Path, url: str, *more: str) -> dict[str, Any]:
    """Runs with ``--output`` and gives the JSON report, whatever the exit code."""
    output = data.parent / "report.json"
    run(data, url, "--output", str(output), *more)
    report: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return report


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4 + 3 = 7 #### 7", "7"),
        ("####7", "7"),
        ("so\n#### 1,234,567", "1234567"),
        ("#### $80,000.50", "80000.50"),
        ("#### 5.00", "5"),
        ("#### -12", "-12"),
        ("#### -$3", "-3"),
        ("#### $-3", "-3"),
        ("#### .5", "0.5"),
        ("#### 18.", "18"),
        ("#### 18 dollars and 2 cents", "18"),
        ("#### 3 #### 9", "3"),
        ("#### ? #### 9", "9"),
        ("the answer is 7", None),
        ("#### seven", None),
        ("### 7", None),
        ("", None),
    ],
)
def test_the_answer_is_the_number_after_the_marker(text: str, number: str | None) -> None:
    assert marked_number(text) == (None if number is None else Decimal(number))


def test_a_lenient_reader_takes_the_last_number() -> None:
    assert last_number("7 apples, then 1,200.") == Decimal(1200)
    assert last_number("no number") is None


def test_prompt_shows_the_shots_and_then_the_bare_question() -> None:
    shots = [Problem(0, "q0", "a0 #### 0"), Problem(1, "q1", "a1 #### 1")]
    asked = Problem(2, "q2", "a2 #### 2")
    assert completion_prompt(asked, shots) == (
        "Question: q0\nAnswer: a0 #### 0\n\nQuestion: q1\nAnswer: a1 #### 1\n\nQuestion: q2\nAnswer:"
    )
    assert [message["role"] for message in chat_messages(asked, shots)] == ["user", "assistant"] * 2 + ["user"]
    assert "a2" not in str(chat_messages(asked, shots))


def test_shots_depend_on_seed_and_question_and_never_hold_the_question() -> None:
    pool = [Problem(i, f"q{i % 10}", "#### 1") for i in range(20)]
    picked = {i: pick_shots(pool[i], pool, 8, seed=0) for i in range(10)}
    assert picked == {i: pick_shots(pool[i], pool, 8, seed=0) for i in range(10)}
    assert all(shot.question != pool[i].question for i, shots in picked.items() for shot in shots)
    assert picked[0] != pick_shots(pool[0], pool, 8, seed=1)
    first, second = (pick_shots(Problem(i, f"new {i}", "#### 1"), pool, 8, seed=0) for i in (0, 1))
    assert first != second
    with pytest.raises(DataError, match="only 18 other rows"):
        pick_shots(pool[0], pool, 19, seed=0)


@pytest.mark.parametrize("line", ["{", "[]", '{"question": "q"}', '{"question": "q", "answer": "no number"}'])
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"question": "q", "answer": "#### 1"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"bad\.jsonl:2"):
        load_problems(path)


def test_requests_are_greedy_streams_with_stop_strings(data: Path) -> None:
    script = Script()
    with serving(script) as endpoint:
        assert run(data, f"{endpoint.url}/v1/", "--num-questions", "2", "--max-tokens", "33") == 0
    assert script.paths == ["/v1/completions"] * 2
    body = script.bodies[0]
    assert body["model"] == "fake-model"
    assert (body["temperature"], body["max_tokens"], body["stream"]) == (0, 33, True)
    assert body["stop"] == ["Question:", "\n\n"]
    assert body["prompt"].count("Question: ") == 3
    assert body["prompt"].endswith("\nAnswer:")


def test_report_has_accuracy_by_kind_and_percentiles(data: Path) -> None:
    def reply(body: dict[str, Any]) -> list[str]:
        asked = body["prompt"].rsplit("Question: ", 1)[1]
        return (
            [" no idea"] if asked.startswith("What is 1") else [" it is", " #### 5" if "is 0" in asked else " #### 4"]
        )

    with serving(Script(reply)) as endpoint:
        report = report_of(data, endpoint.url)
    figures = report["run"]
    assert figures["accuracy"] == pytest.approx(4 / 6)
    assert figures["invalid"] == 1
    assert figures["accuracy_by_kind"]["near"] == {"accuracy": pytest.approx(2 / 3), "questions": 3}
    assert figures["served_by"] == {"127.0.0.1:8998": 6}
    assert set(figures["ttft_s"]) == {"p50", "p90", "p99"}
    assert figures["completion_tokens"] == 5 * 4 + 2
    assert [row["index"] for row in figures["rows"]] == list(range(6))
    assert report["failed_gates"] == []


def test_intervals_are_not_measured_where_the_pieces_are_read_together(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between them lies only the time to read them: 0.0 ms."""
    with serving(Script(at_once=True)) as endpoint:
        figures = report_of(data, endpoint.url)["run"]
    assert (figures["tpot_s"], figures["itl_s"]) == ({}, {})
    assert figures["intervals"] == {"answers": 6, "measured": 0}
    assert set(figures["ttft_s"]) == {"p50", "p90", "p99"}
    printed = capsys.readouterr().err
    assert printed.count("not measured") == 6
    assert "0 of 6 answers" in " ".join(printed.split())


@pytest.mark.parametrize(("together", "known"), [((), True), ((3,), True), ((1, 3), False), ((1, 2, 3, 4), False)])
def test_intervals_are_known_if_most_pieces_come_alone(together: tuple[int, ...], known: bool) -> None:
    answer = Answer(completion_tokens=9)
    for i in range(5):
        answer.add({"choices": [{"text": "x"}]}, 1.0 + i, is_together=i in together)
    assert answer.intervals_are_known is known
    assert (answer.tpot_s, answer.itl_s) == ((0.5, (1.0,) * 4) if known else (None, ()))


def test_chat_api_reads_deltas(data: Path) -> None:
    script = Script()
    with serving(script) as endpoint:
        assert run(data, endpoint.url, "--api", "chat", "--min-accuracy", "1", "--num-questions", "0") == 0
    assert len(script.bodies) == 6
    assert script.paths[0] == "/v1/chat/completions"
    assert [message["role"] for message in script.bodies[0]["messages"]] == ["user", "assistant"] * 2 + ["user"]


def test_min_accuracy_sets_the_exit_code(data: Path) -> None:
    with serving(Script(lambda body: [" #### 5"])) as endpoint:
        assert run(data, endpoint.url) == 0
        assert run(data, endpoint.url, "--min-accuracy", "0.01") == 1
    with serving(Script()) as endpoint:
        assert run(data, endpoint.url, "--min-accuracy", "1") == 0


def test_equal_baseline_passes_and_a_different_one_fails_with_the_place(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(body: dict[str, Any]) -> list[str]:
        return [
            " It is 4 . #### 5" if "What is 3" in body["prompt"].rsplit("Question: ", 1)[1] else " It is 4 . #### 4"
        ]

    with serving(Script()) as endpoint, serving(Script()) as same, serving(Script(other)) as different:
        equal = ("--baseline-url", same.url, "--require-equal")
        assert run(data, endpoint.url, *equal) == 0
        assert run(data, endpoint.url, "--baseline-url", different.url) == 0
        assert run(data, endpoint.url, "--baseline-url", different.url, "--require-equal") == 1
        report = report_of(data, endpoint.url, "--baseline-url", different.url)
    assert "first difference: question 3, character 16" in capsys.readouterr().err
    assert report["comparison"] == {"equal": 5, "different": [{"index": 3, "position": 16}]}


def test_two_failed_answers_are_not_equal() -> None:
    problem = Problem(0, "q", "#### 1")
    failed = Run("u", "m", [problem], [Answer(error="HTTP 500")], 1.0)
    assert len(differences(failed, failed)) == 1
    cut = Run("u", "m", [problem], [Answer(text="#### 1", finish_reason="length")], 1.0)
    whole = Run("u", "m", [problem], [Answer(text="#### 1", finish_reason="stop")], 1.0)
    assert len(differences(cut, whole)) == 1
    assert differences(whole, whole) == []


@pytest.mark.parametrize("headers", [{}, {"x-pd-prefill": "local"}])
def test_require_prefill_refuses_local_and_unnamed_work(data: Path, headers: dict[str, str]) -> None:
    with serving(Script(headers=headers)) as endpoint:
        assert run(data, endpoint.url) == 0
        assert run(data, endpoint.url, "--require-prefill") == 1
    for script in (Script(), Script(headers={}, pd={"prefill": "127.0.0.1:8998", "room": "7"})):
        with serving(script) as endpoint:
            assert run(data, endpoint.url, "--require-prefill") == 0


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(status=503), "HTTP 503: no prefill peer"),
        (Script(error_event="room 7: swa digest differs"), "error in the stream: room 7: swa digest differs"),
        (Script(done=False), r"the stream ended without \[DONE\]"),
    ],
)
def test_a_failed_question_is_counted_shown_and_fails_the_run(
    data: Path, script: Script, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(script) as endpoint:
        assert run(data, endpoint.url) == 1
        report = report_of(data, endpoint.url)
    assert report["run"]["errors"] == 6
    assert report["run"]["accuracy"] == 0
    shown = capsys.readouterr().err
    assert "6 questions failed on the endpoint" in shown
    assert reason.replace("\\", "") in shown


def test_a_stalled_answer_meets_its_deadline(data: Path) -> None:
    stall = threading.Event()
    with serving(Script(stall=stall)) as endpoint:
        report = report_of(data, endpoint.url, "--timeout", "0.3", "--num-questions", "1")
        stall.set()
    assert report["run"]["rows"][0]["error"] == "no complete answer within 0.3 s"
    assert report["run"]["rows"][0]["total_s"] < 5


def test_an_unreachable_server_is_exit_code_2(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        assert run(data, f"http://127.0.0.1:{unused.getsockname()[1]}") == 2
    assert "does not answer" in capsys.readouterr().err


def test_a_server_that_dies_ends_the_run_at_once(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(die_after=2)
    with serving(script) as endpoint:
        assert run(data, endpoint.url, "--concurrency", "1") == 2
    assert len(script.bodies) == 3
    assert "died during the run" in capsys.readouterr().err


def test_arguments_that_cannot_work_are_refused(data: Path) -> None:
    for wrong in (["--require-equal"], ["--min-accuracy", "2"], ["--concurrency", "0"], ["--timeout", "0"]):
        with pytest.raises(SystemExit) as refused:
            run(data, "http://127.0.0.1:9", *wrong)
        assert refused.value.code == 2
    assert gsm8k.main(["--data", str(data.parent / "absent.jsonl")]) == 2
    assert run(data, "http://127.0.0.1:9", "--num-shots", "6") == 2


def test_percentiles_of_nothing_are_absent() -> None:
    run_ = Run("u", "m", [Problem(0, "q", "#### 1")], [Answer(error="lost")], 1.0)
    figures = as_json(run_)
    assert figures["ttft_s"] == {}
    assert figures["accuracy"] == 0
