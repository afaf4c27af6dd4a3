"""scripts/check_cuda.py without a GPU: it says so, names what fails, and finds a network that computes otherwise."""

from __future__ import annotations

import copy

import pytest
import torch
from cuda_check import main as tool
from cuda_check import section
from cuda_check.lines import Line
from cuda_check.main import BUDGETS_S, END_S, NO_DEVICE, Ran, main, run_section
from cuda_check.models import FLASH, SMALL, config_of, nbytes_of, on_meta, random_model, runner_of
from cuda_check.parity import CPU, answers, compare

LONG_S = 300.0
"""No test here is about time."""


def test_the_budgets_are_of_the_sections_and_less_than_eight_minutes() -> None:
    assert list(BUDGETS_S) == list(section.SECTIONS)
    assert sum(BUDGETS_S.values()) + len(BUDGETS_S) * END_S < 8 * 60


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    absent = Ran("facts", 1.0, [Line("cuda:0", "torch sees no GPU", ok=False)], has_device=False)
    monkeypatch.setattr(tool, "run_section", lambda *_: absent)
    assert main([]) == 0
    assert capsys.readouterr().out == "no GPU: torch sees no GPU\n"


def test_a_section_that_fails_is_named_and_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, _device: str, _budget_s: float) -> Ran:
        lines = [Line("logits", "differ by 3", ok=name != "waiting")]
        return Ran(name, 1.0, lines, "no end within 90 s" if name == "parity" else "")

    monkeypatch.setattr(tool, "run_section", run)
    assert main([]) == 1
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if line.startswith("FAILED")] == ["FAILED: parity", "FAILED: waiting"]
    assert "cuda:0: 3 sections of 5 well in 5 s" in said
    assert "\nspeed (1 s)\n  ok      logits" in said


@pytest.mark.processes
@pytest.mark.parametrize(
    ("code", "budget_s", "trouble"),
    [
        ("", LONG_S, ""),
        ("raise KeyError('nothing')", LONG_S, "ended with 1: KeyError: 'nothing'"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", LONG_S, "ended with -11: it said nothing"),
        ("import time; time.sleep(600)", 2.0, "no end within 2 s"),
    ],
    ids=["ends", "raises", "crashes", "hangs"],
)
def test_a_section_that_ends_early_or_not_at_all_is_trouble(code: str, budget_s: float, trouble: str) -> None:
    ran = run_section("speed", "cpu", budget_s, ("-c", f"print('a warning')\n{code}"))
    assert ran.trouble == trouble
    assert ran.ok is not bool(trouble)


def test_a_section_says_what_it_finds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert section.main("facts", "cpu") == 0
    assert [Line.of_json(line).what for line in capsys.readouterr().out.splitlines()] == ["torch", "Mooncake"]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert section.main("facts", "cuda:0") == NO_DEVICE
    assert "--device cuda:0: this torch" in Line.of_json(capsys.readouterr().out).found


@torch.no_grad()
def test_a_network_that_computes_otherwise_is_found() -> None:
    model = random_model(config_of(SMALL), torch.float32, CPU)
    prompts = [[3 + i % 500 for i in range(n)] for n in (40, 300)]
    base = answers(runner_of(model, CPU), prompts)
    assert all(line.ok for line in compare("same", base, answers(runner_of(model, CPU), prompts, base), 1e-6))
    other = copy.deepcopy(model)
    for expert in other.layers[3].ffn.experts:  # type: ignore[union-attr]
        expert.w2.weight.mul_(1.5)
    logits, tokens = compare("other", base, answers(runner_of(other, CPU), prompts, base), 1e-4)
    assert not logits.ok
    assert not tokens.ok


def test_flashs_layers_have_their_real_size() -> None:
    """6.6 billion parameters in one layer's experts: 25.2 million in each of 257."""
    model = on_meta(config_of(FLASH, 2), torch.bfloat16)
    experts = model.get_submodule("layers.1.ffn")
    assert nbytes_of(experts) // 2 == pytest.approx(257 * 3 * 4096 * 2048, rel=1e-3)
    assert model.config.compress_ratios == (0, 4)
    assert (model.config.head_dim, model.config.num_attention_heads, model.config.index_topk) == (512, 64, 512)
