"""Trains, measures and exports the tiny DeepSeek-V4 under `server/assets/tiny-dsv4`.

python scripts/train_tiny.py train        # resumes where it stopped; exports when done
python scripts/train_tiny.py eval         # accuracy, healthy and with state zeroed before the decode
python scripts/train_tiny.py questions    # the bundled question sets
python scripts/train_tiny.py readme       # the checkpoint's README from the curve and the measured table
python scripts/train_tiny.py draft        # the NextN draft layer on the finished target, into the same checkpoint
"""

import os

# Set before torch starts its threads: waiting threads must not burn the cores they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from tiny.curriculum import STAGES
from tiny.draft import draft
from tiny.evaluation import Table, evaluate
from tiny.export import export_checkpoint, export_questions, load_exported
from tiny.problems import Split, question_set
from tiny.readme import write_readme
from tiny.tokenizer import build_tokenizer
from tiny.training import Settings, Trainer
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

ASSETS = Path(__file__).resolve().parents[1] / "server" / "assets"
SEED = 0

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
    trainer = Trainer(build_tokenizer(), STAGES, Settings(SEED, run_folder))
    if trainer.resume():
        console.print(f"resuming at step {trainer.step} of {trainer.n_steps}")
    trainer.run(console)
    export_checkpoint(trainer.model, checkpoint)
    console.print(f"exported {checkpoint} after {trainer.seconds / 60:.0f} minutes of training")


@app.command(name="eval")
def measure(
    run_folder: RunFolder = Path("build/tiny-dsv4"),
    checkpoint: Checkpoint = ASSETS / "tiny-dsv4",
    n_problems: Annotated[int, typer.Option(help="Held-out problems to ask, 4-shot and greedy.")] = 200,
    threads: Threads = 2,
) -> None:
    """Print accuracy on held-out problems, healthy and after zeroing one piece of the prompt's state."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    model, tokenizer = load_exported(checkpoint), PreTrainedTokenizerFast.from_pretrained(checkpoint)
    tests = question_set(Split.TEST, n_problems, SEED)
    shots = question_set(Split.SHOTS, 64, SEED)
    with Progress(console=console) as progress:
        bar = progress.add_task("problems", total=n_problems)
        outcomes = evaluate(model, tokenizer, tests, shots, on_problem=lambda: progress.advance(bar))
    table = Table.of(outcomes)
    console.print(table.rendered())
    run_folder.mkdir(parents=True, exist_ok=True)
    (run_folder / "table.json").write_text(json.dumps(asdict(table), indent=1) + "\n")


@app.command()
def questions(folder: Annotated[Path, typer.Option(help="Where to write.")] = ASSETS / "tiny-gsm8k") -> None:
    """Write test.jsonl and train.jsonl."""
    export_questions(folder, SEED)


@app.command()
def readme(
    run_folder: RunFolder = Path("build/tiny-dsv4"),
    checkpoint: Checkpoint = ASSETS / "tiny-dsv4",
) -> None:
    """Write the checkpoint's README.md from RUN_FOLDER's curve.json and table.json."""
    write_readme(checkpoint, run_folder, SEED)


app.command()(draft)


if __name__ == "__main__":
    app()
