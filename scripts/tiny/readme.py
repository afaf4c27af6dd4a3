"""The README of the exported checkpoint: size, recipe, curve and knock-out table; and its section on the draft."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import safe_open

from .acceptance import Acceptance
from .curriculum import STAGES
from .draft_training import DraftTrainer
from .evaluation import COLUMNS
from .loop import Row

_TARGET = """\
# tiny-dsv4

A DeepSeek-V4 of {n_parameters:.1f} M parameters ({megabytes:.1f} MB, fp32, official keys) that answers templated
grade-school problems. It has every kind of layer: sliding window only, CSA (ratio 4, trained indexer) and HCA (ratio
128), a hash-routed and three top-k mixtures of experts, and two hyper-connection streams. It exists for tests and
demonstrations: whatever part of a request's state gets lost between prefill and decode shows as wrong answers.

| what | value |
|---|---|
| tokenizer | byte-level, {vocab_size} tokens: 256 bytes, the words of the problems, ` 0` to ` 119` |
| forms it knows | few-shot `Question: ... Answer: ...` and the chat template, both with BOS first |
| problems | `local`: one or two steps over numbers in the question; `far`: the fact lies 64 to 180 tokens back |
| window / index_topk | {window} tokens / {index_topk} entries |
| trained | {n_steps} steps, {minutes:.0f} minutes on two shared CPU cores, seed {seed} |

Prices of `far` problems are named facts that CSA looks up. Weights travel through HCA: training hides the CSA entries
over them and teaches the indexer not to pick them. The indexer learns the attention mass of the heads over entries.

## Reproduce

    python scripts/train_tiny.py train
    python scripts/train_tiny.py eval
    python scripts/train_tiny.py readme

The bundled weights come from one run during which the stages were still being tuned: each change took effect from a
checkpoint on. A fresh run goes through the final stages from the start and ends with other weights.

Problems of `tiny-gsm8k/test.jsonl` and `train.jsonl` never occur in training: a hash of the question decides which of
the three it belongs to.

## Training curve

Loss, and the share of right tokens: of answers, of recalled prices, of recalled weights.

{curve}

Stages: {stages}.

## Exact answers on {n_problems} held-out problems, 4-shot, greedy

`python scripts/train_tiny.py eval`: each row zeroes one piece of the prompt's state between prompt and decode.

{table}
"""


_DRAFT_HEADING = "## The draft layer"

_DRAFT = """\
{heading}

`mtp.0.*` is a NextN layer trained on this frozen target: its next-token distributions, first one token ahead, then in
chains of {depth} that are fed with the layer's own streams, as in decoding. {n_steps} steps took {minutes:.0f} minutes
on two shared CPU cores after the target had read the documents, seed {seed}. A new target needs a new draft:

    python scripts/train_tiny.py draft

Accept length (tokens that a step gives out: 1 + accepted drafts) on the first {n_questions} problems of
`tiny-gsm8k/test.jsonl`, 4-shot, greedy, through the engine:

| drafted tokens | mean accept length | share of steps with at least 1, 2, ... accepted drafts |
|---|---|---|
{results}

Curve: loss, and accept length on unseen documents where a chain starts at every token of an answer.

| step | loss | accept length |
|---|---|---|
{curve}
"""


def write_readme(checkpoint: Path, run_folder: Path, seed: int) -> None:
    """Write `checkpoint`/README.md from the curve and the table that `run_folder` holds."""
    config = json.loads((checkpoint / "config.json").read_text())
    curve = json.loads((run_folder / "curve.json").read_text())
    table = json.loads((run_folder / "table.json").read_text())
    weights = checkpoint / "model.safetensors"
    text = _TARGET.format(
        n_parameters=_n_parameters(weights) / 1e6,
        megabytes=weights.stat().st_size / 1e6,
        vocab_size=config["vocab_size"],
        window=config["sliding_window"],
        index_topk=config["index_topk"],
        n_steps=sum(stage.n_steps for stage in STAGES),
        minutes=curve[-1]["minutes"],
        seed=seed,
        curve=_markdown(["step", "loss", "answer", "price", "weight", "minutes"], _thinned(curve, n_rows=16)),
        stages="; ".join(f"{stage.name} ({stage.n_steps} steps)" for stage in STAGES),
        n_problems=table["n_problems"],
        table=_markdown(
            ["state zeroed", *COLUMNS], [{"state zeroed": name, **row} for name, row in table["rows"].items()]
        ),
    )
    (checkpoint / "README.md").write_text(text)


def write_draft_section(readme: Path, trainer: DraftTrainer, results: Sequence[Acceptance], n_questions: int) -> None:
    """Puts command, accept lengths and curve at the end of the README, in place of an earlier section on the draft."""
    text = _DRAFT.format(
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


def _n_parameters(weights: Path) -> int:
    with safe_open(weights, framework="pt") as tensors:
        return sum(tensors.get_tensor(key).numel() for key in tensors.keys() if not key.endswith("tid2eid"))  # noqa: SIM118


def _thinned(rows: list[Row], n_rows: int) -> list[Row]:
    """About `n_rows` of `rows`, the last one among them."""
    return rows[::-1][:: max(1, len(rows) // n_rows)][::-1]


def _markdown(columns: list[str], rows: Sequence[Mapping[str, object]]) -> str:
    def cell(value: object) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(cell(row.get(column, "")) for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)
