"""The scores of a checkpoint: every case is asked through the real engine, and only a right answer counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark.local_engine import LocalEngine
from tiny.chat_format import THINK, call_text
from tiny.checkpoint import export_checkpoint
from tiny.model import build_model
from tiny.scores import NUMERICS, Case, all_cases, rendered, score
from tiny.tokenizer import build_tokenizer

from server.cache.row_formats import QUANTIZED_ROWS
from tests.support.checkpoints import BUNDLED

NAMES = {
    *(f"{form}, {kind}" for form in ("completion", "chat", "thinking") for kind in ("local", "far")),
    *("sums", "sums, thinking", "another tool: not called", "tool, difference: called", "tool, product: called"),
    *(f"tool{mode}: {step}" for mode in ("", ", thinking") for step in ("called", "answered")),
}


@pytest.mark.parametrize(
    ("case", "right", "wrong"),
    [
        (Case("sums", "", "3 + 4 = 7"), ["3 + 4 = 7", " 3 + 4 = 7"], ["3 + 4 = 8", "7", ""]),
        (Case("completion", "", "#### 12"), ["3 * 4 = 12 #### 12"], ["3 * 4 = 12", "#### 13"]),
        (Case("t", "", "4 = 4", thinks=True), ["why</think>4 = 4"], ["4 = 4", "</think>4 = 4", "4 = 4</think>"]),
        (Case("tool", "", call_text("f", {"a": 1})), [call_text("f", {"a": 1})], [call_text("f", {"a": 2})]),
    ],
)
def test_only_the_right_answer_counts(case: Case, right: list[str], wrong: list[str]) -> None:
    assert all(case.is_right(answer) for answer in right)
    assert not any(case.is_right(answer) for answer in wrong)


def test_cases_cover_every_score_and_are_the_same_each_time() -> None:
    cases = all_cases(n_questions=20, n_sums=5, seed=0)
    assert {case.score for case in cases} == NAMES
    assert cases == all_cases(n_questions=20, n_sums=5, seed=0)
    assert any("What is 3 + 4 ?" in case.prompt for case in cases if case.score == "sums")
    assert all(case.thinks == case.prompt.endswith(THINK) for case in cases)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_an_untrained_checkpoint_scores_nothing(tmp_path: Path, numerics: str) -> None:
    tokenizer = build_tokenizer()
    export_checkpoint(build_model(len(tokenizer), seed=0), tmp_path / "tiny")
    scores = score(tmp_path / "tiny", all_cases(n_questions=4, n_sums=2, seed=0), 1, numerics)
    assert {each.name for each in scores} == NAMES
    assert {each.numerics for each in scores} == {numerics}
    assert all(each.n_right == 0 and each.first_wrong for each in scores)
    assert rendered(scores).row_count == len(NAMES)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_official_scores_are_those_of_rounded_rows(numerics: str) -> None:
    engine = LocalEngine(BUNDLED, threads=1, more=NUMERICS[numerics])
    engine.close()
    rounded = any(component.dtype in QUANTIZED_ROWS for component in engine.layout.components)
    assert rounded is (numerics == "official")


@pytest.mark.parametrize("numerics", NUMERICS)
def test_the_bundled_checkpoint_does_what_it_was_trained_for(numerics: str) -> None:
    """Nearly always is the goal; a few cases show that they, the engine and the checkpoint fit together."""
    cases = all_cases(n_questions=20, n_sums=8, seed=0)
    scores = score(BUNDLED, cases, 1, numerics)
    assert sum(each.n_right for each in scores) >= 0.9 * len(cases)
    weak = {"tool, difference: called"}  # it often writes + for -
    assert all(each.share >= 0.7 for each in scores if each.name not in weak), scores
