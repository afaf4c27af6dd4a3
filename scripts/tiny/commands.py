"""Trains, measures and exports the tiny DeepSeek-V4 under `server/assets/tiny-dsv4`.

python scripts/train_tiny.py train        # resumes where it stopped; exports when done
python scripts/train_tiny.py eval         # accuracy, healthy and with state zeroed before the decode
python scripts/train_tiny.py questions    # the bundled question sets
python scripts/train_tiny.py readme       # the checkpoint's README from the curve and the measured table
python scripts/train_tiny.py draft        # the NextN draft layer on the finished target, into the same checkpoint
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from .acceptance import measure
from .checkpoint import export_checkpoint, load_exported, write_draft
from .curriculum import STAGES
from .draft_training import DraftTrainer, Settings
from .evaluation import evaluate
from .problems import Split, question_set
from .readme import shares, write_draft_section, write_readme
from .tokenizer import build_tokenizer
from .training import Trainer

ASSETS = Path(__file__).resolve().parents[2] / "server" / "assets"
SEED = 0
MOST_DRAFTED = 3

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
console = Console()

Checkpoint = Annotated[Path, typer.Option(help="The checkpoint folder to write or read.")]
RunFolder = Annotated[Path, typer.Option(help="Where checkpoint.pt, curve.json and table.json of a run are kept.")]
Threads = Annotated[int, typer.Option(help="Threads of torch.")]


@app.command()
def train(
    run_folder: RunFolder = Path("build/tiny-dsv4"),
    checkpoint: Checkpoint = ASSETS / "tiny-dsv4",
    threads: Threads = 2,
) -> None:
    """Train through all stages, resuming from RUN_FOLDER if it holds a checkpoint, then export."""
    torch.set_num_threads(threads)
    trainer = Trainer(build_tokenizer(), STAGES, SEED, run_folder)
    if trainer.resume():
        console.print(f"resuming at step {trainer.step} of {trainer.schedule.n_steps}")
    trainer.run()
    export_checkpoint(trainer.model, checkpoint)
    console.print(f"exported {checkpoint} after {trainer.seconds / 60:.0f} minutes of training")


@app.command(name="eval")
def evaluation(
    run_folder: RunFolder = Path("build/tiny-dsv4"),
    checkpoint: Checkpoint = ASSETS / "tiny-dsv4",
    n_problems: Annotated[int, typer.Option(help="Held-out problems to ask, 4-shot and greedy.")] = 200,
    threads: Threads = 2,
) -> None:
    """Print accuracy on held-out problems, healthy and after zeroing one piece of the prompt's state."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    model, tokenizer = load_exported(checkpoint), PreTrainedTokenizerFast.from_pretrained(checkpoint)
    tests, shots = question_set(Split.TEST, n_problems, SEED), question_set(Split.SHOTS, 64, SEED)
    with Progress(console=console) as progress:
        bar = progress.add_task("problems", total=n_problems)
        found = evaluate(model, tokenizer, tests, shots, n_shots=4, seed=SEED, on_problem=lambda: progress.advance(bar))
    console.print(found.rendered())
    run_folder.mkdir(parents=True, exist_ok=True)
    (run_folder / "table.json").write_text(json.dumps(asdict(found), indent=1) + "\n")


@app.command()
def questions(folder: Annotated[Path, typer.Option(help="Where to write.")] = ASSETS / "tiny-gsm8k") -> None:
    """Write test.jsonl and train.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, n_problems in ((Split.TEST, 400), (Split.SHOTS, 64)):
        made = question_set(split, n_problems, SEED)
        rows = [{"question": each.question, "answer": each.answer, "kind": each.kind} for each in made]
        (folder / f"{split.value}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@app.command()
def readme(
    run_folder: RunFolder = Path("build/tiny-dsv4"),
    checkpoint: Checkpoint = ASSETS / "tiny-dsv4",
) -> None:
    """Write the checkpoint's README.md from RUN_FOLDER's curve.json and table.json."""
    write_readme(checkpoint, run_folder, SEED)


@app.command()
def draft(
    run_folder: Annotated[Path, typer.Option(help="Where checkpoint.pt and curve.json are kept.")] = Path(
        "build/tiny-draft"
    ),
    checkpoint: Annotated[Path, typer.Option(help="The target's checkpoint folder, which gets the draft.")] = ASSETS
    / "tiny-dsv4",
    seed: Annotated[int, typer.Option(help="Seed of the documents and their order.")] = Settings.seed,
    n_steps: Annotated[int, typer.Option(help="Optimiser steps.")] = Settings.n_steps,
    n_questions: Annotated[int, typer.Option(help="Bundled questions to measure accept lengths on.")] = 60,
    threads: Threads = 2,
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
        results.append(measure(checkpoint, k, n_questions, threads))
        console.print(f"{k} drafted: mean accept length {results[-1].mean_length:.3f}, accepted {shares(results[-1])}")
    write_draft_section(checkpoint / "README.md", trainer, results, n_questions)
