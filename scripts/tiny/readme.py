"""The README of the exported checkpoint: size, recipe, curve and knock-out table; and its section on the draft."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from .acceptance import Acceptance
from .curriculum import STAGES
from .draft_training import DraftTrainer
from .evaluation import COLUMNS
from .loop import Row
from .training import MARKS

TABLE, SCORES = "table.json", "scores.json"
_DRAFT_HEADING = "## The draft layer"


def write_readme(checkpoint: Path, run_folder: Path, seed: int) -> None:
    """Write `checkpoint`/README.md from the curve, the table and the scores that `run_folder` holds."""
    config = json.loads((checkpoint / "config.json").read_text())
    curve = json.loads((run_folder / "curve.json").read_text())
    table = json.loads((run_folder / TABLE).read_text())
    scores = json.loads((run_folder / SCORES).read_text())
    weights = checkpoint / "model.safetensors"
    text = _template("readme.md").format(
        n_parameters=_n_parameters(weights) / 1e6,
        megabytes=weights.stat().st_size / 1e6,
        vocab_size=config["vocab_size"],
        window=config["sliding_window"],
        index_topk=config["index_topk"],
        n_steps=sum(stage.n_steps for stage in STAGES),
        minutes=curve[-1]["minutes"],
        seed=seed,
        curve=_markdown(["step", "loss", *MARKS.values(), "minutes"], _thinned(curve, n_rows=16)),
        stages="; ".join(f"{stage.name} ({stage.n_steps} steps)" for stage in STAGES),
        scores=_markdown(["score", "numerics", "right", "of", "share"], [_score_row(each) for each in scores]),
        n_problems=table["n_problems"],
        table=_markdown(
            ["state zeroed", *COLUMNS], [{"state zeroed": name, **row} for name, row in table["rows"].items()]
        ),
    )
    (checkpoint / "README.md").write_text(text)


def write_draft_section(readme: Path, trainer: DraftTrainer, results: Sequence[Acceptance], n_questions: int) -> None:
    """Puts command, accept lengths and curve at the end of the README, in place of an earlier section on the draft."""
    text = _template("readme_draft.md").format(
        heading=_DRAFT_HEADING,
        depth=trainer.settings.depth,
        n_steps=trainer.step,
        minutes=trainer.seconds / 60,
        seed=trainer.settings.seed,
        n_questions=n_questions,
        results="\n".join(f"| {result.k} | {result.mean_length:.2f} | {shares(result)} |" for result in results),
        curve="\n".join(
            f"| {row['step']:.0f} | {row['loss']:.3f} | {row['exam_accept']:.2f} |"
            for row in _thinned(trainer.curve, n_rows=10)
        ),
    )
    before = readme.read_text(encoding="utf-8") if readme.exists() else ""
    kept = before.partition(_DRAFT_HEADING)[0].rstrip()
    staged = readme.with_name(f".{readme.name}.staged")
    staged.write_text(f"{kept}\n\n{text}" if kept else text, encoding="utf-8")
    staged.replace(readme)


def shares(result: Acceptance) -> str:
    return ", ".join(f"{share:.2f}" for share in result.shares)


def _template(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _n_parameters(weights: Path) -> int:
    with safe_open(weights, framework="pt") as tensors:
        return sum(tensors.get_tensor(key).numel() for key in tensors.keys() if not key.endswith("tid2eid"))  # noqa: SIM118


def _score_row(score: Mapping[str, Any]) -> Mapping[str, object]:
    n_right, n_cases = score["n_right"], score["n_cases"]
    return {
        "score": score["name"],
        "numerics": score["numerics"],
        "right": n_right,
        "of": n_cases,
        "share": n_right / n_cases,
    }


def _thinned(rows: list[Row], n_rows: int) -> list[Row]:
    """About `n_rows` of `rows`, the last one among them."""
    return rows[::-1][:: max(1, len(rows) // n_rows)][::-1]


def _markdown(columns: list[str], rows: Sequence[Mapping[str, object]]) -> str:
    def cell(value: object) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(cell(row.get(column, "")) for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
