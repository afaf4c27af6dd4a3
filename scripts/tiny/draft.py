"""The `draft` command: trains the NextN layer of a checkpoint, writes it there and measures its accept lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from .acceptance import Acceptance, measure
from .draft_checkpoint import write_draft
from .draft_training import DraftTrainer, Settings
from .tokenizer import build_tokenizer

ASSETS = Path(__file__).resolve().parents[2] / "server" / "assets"
HEADING = "## The draft layer"
MOST_DRAFTED = 3
N_CURVE_ROWS = 10

console = Console()


def draft(
    run_folder: Annotated[Path, typer.Option(help="Where checkpoint.pt and curve.json are kept.")] = Path(
        "build/tiny-draft"
    ),
    checkpoint: Annotated[Path, typer.Option(help="The target's checkpoint folder, which gets the draft.")] = ASSETS
    / "tiny-dsv4",
    seed: Annotated[int, typer.Option(help="Seed of the documents and their order.")] = Settings.seed,
    n_steps: Annotated[int, typer.Option(help="Optimiser steps.")] = Settings.n_steps,
    n_questions: Annotated[int, typer.Option(help="Bundled questions to measure accept lengths on.")] = 60,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 2,
) -> None:
    """Train the NextN draft layer on the finished target, resuming from RUN_FOLDER, and write it into CHECKPOINT."""
    torch.set_num_threads(threads)
    trainer = DraftTrainer(checkpoint, build_tokenizer(), Settings(seed=seed, n_steps=n_steps), run_folder)
    if trainer.resume():
        console.print(f"resuming at step {trainer.step} of {trainer.settings.n_steps}")
    trainer.run()
    write_draft(checkpoint, trainer.layer, trainer.target_digest)
    console.print(f"wrote the draft into {checkpoint} after {trainer.seconds / 60:.0f} minutes of training")
    results = []
    for k in range(1, MOST_DRAFTED + 1):
        results.append(measure(checkpoint, ASSETS / "tiny-gsm8k", k, n_questions, threads))
        console.print(f"{k} drafted: mean accept length {results[-1].mean_length:.3f}, accepted {_shares(results[-1])}")
    write_section(checkpoint / "README.md", section(trainer, results, n_questions))


_SECTION = """\
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


def section(trainer: DraftTrainer, results: list[Acceptance], n_questions: int) -> str:
    """The README's words on the draft: command, accept lengths, curve."""
    rows = trainer.curve[::-1][:: max(1, len(trainer.curve) // N_CURVE_ROWS)][::-1]
    return _SECTION.format(
        heading=HEADING,
        depth=trainer.settings.depth,
        n_steps=trainer.step,
        minutes=trainer.seconds / 60,
        seed=trainer.settings.seed,
        n_questions=n_questions,
        results="\n".join(f"| {result.k} | {result.mean_length:.2f} | {_shares(result)} |" for result in results),
        curve="\n".join(f"| {row['step']:.0f} | {row['loss']:.3f} | {row['exam_accept']:.2f} |" for row in rows),
    )


def write_section(readme: Path, text: str) -> None:
    """Puts `text` at the end of the README, in place of an earlier section on the draft."""
    before = readme.read_text(encoding="utf-8") if readme.exists() else ""
    kept = before.partition(HEADING)[0].rstrip()
    staged = readme.with_name(f".{readme.name}.staged")
    staged.write_text(f"{kept}\n\n{text}" if kept else text, encoding="utf-8")
    staged.replace(readme)


def _shares(result: Acceptance) -> str:
    return ", ".join(f"{share:.2f}" for share in result.shares)
