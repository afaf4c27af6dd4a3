"""Trains, measures and exports the tiny DeepSeek-V4 under `server/assets/tiny-dsv4`.

python scripts/train_tiny.py train        # everything, from the seed to the README; goes on where it was stopped
python scripts/train_tiny.py evaluate     # what a checkpoint can do, score by score
python scripts/train_tiny.py knockouts    # accuracy, healthy and with state zeroed before the decode
python scripts/train_tiny.py draft        # only the NextN draft layer, on a finished target, into the same checkpoint
python scripts/train_tiny.py readme       # only the checkpoint's README, from what the others kept
python scripts/train_tiny.py questions    # the bundled question sets
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
from .readme import SCORES, TABLE, shares, write_draft_section, write_readme
from .scores import NUMERICS, all_cases, rendered, score
from .tokenizer import build_tokenizer
from .training import Trainer

ASSETS = Path(__file__).resolve().parents[2] / "server" / "assets"
SEED = 0
MOST_DRAFTED = 3
SHOWN_CHARS = 120

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, rich_markup_mode=None)
console = Console()

Checkpoint = Annotated[Path, typer.Option(help="The checkpoint folder to write or read.")]
State = Annotated[Path, typer.Option(help="Where the state of the run, its curves and measures are kept.")]
Threads = Annotated[int, typer.Option(help="Threads of torch; the weights depend on it in their last bits.")]
NQuestions = Annotated[int, typer.Option(help="Bundled questions to ask.")]

DEFAULT_STATE, DEFAULT_CHECKPOINT = Path("build/tiny-dsv4"), ASSETS / "tiny-dsv4"


@app.command()
def train(state: State = DEFAULT_STATE, checkpoint: Checkpoint = DEFAULT_CHECKPOINT, threads: Threads = 1) -> None:
    """Train the target through all stages, export it, train its draft, measure both and write the README.

    Stopped at any time, it goes on from STATE, and ends with the same weights as without a stop.
    """
    torch.set_num_threads(threads)
    trainer = Trainer(build_tokenizer(), STAGES, SEED, state)
    if trainer.resume():
        console.print(f"resuming at step {trainer.step} of {trainer.schedule.n_steps}")
    trainer.run()
    export_checkpoint(trainer.model, checkpoint)
    console.print(f"exported {checkpoint} after {trainer.seconds / 60:.0f} minutes of training")
    knockouts(state, checkpoint, threads=threads)
    evaluation(state, checkpoint, threads=threads)
    readme(state, checkpoint)
    draft(state, checkpoint, threads=threads)


@app.command(name="evaluate")
def evaluation(
    state: State = DEFAULT_STATE,
    checkpoint: Checkpoint = DEFAULT_CHECKPOINT,
    n_questions: NQuestions = 400,
    n_sums: Annotated[int, typer.Option(help="Sums to ask, in each form.")] = 200,
    threads: Threads = 1,
) -> None:
    """Print the share of right answers to questions, to sums, with thinking and with tools, in both numerics."""
    cases = all_cases(n_questions, n_sums, SEED)
    scores = [each for numerics in NUMERICS for each in score(checkpoint, cases, threads, numerics)]
    console.print(rendered(scores))
    for each in scores:
        if each.first_wrong:
            prompt, answer = each.first_wrong
            console.print(
                f"{each.name}, {each.numerics}: ...{prompt[-SHOWN_CHARS:]!r} -> {answer[:SHOWN_CHARS]!r}", markup=False
            )
    _keep(state / SCORES, [asdict(each) for each in scores])


@app.command()
def knockouts(
    state: State = DEFAULT_STATE,
    checkpoint: Checkpoint = DEFAULT_CHECKPOINT,
    n_problems: Annotated[int, typer.Option(help="Held-out problems to ask, 4-shot and greedy.")] = 200,
    threads: Threads = 1,
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
    _keep(state / TABLE, asdict(found))


@app.command()
def questions(folder: Annotated[Path, typer.Option(help="Where to write.")] = ASSETS / "tiny-gsm8k") -> None:
    """Write test.jsonl and train.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, n_problems in ((Split.TEST, 400), (Split.SHOTS, 64)):
        made = question_set(split, n_problems, SEED)
        rows = [{"question": each.question, "answer": each.answer, "kind": each.kind} for each in made]
        (folder / f"{split.value}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@app.command()
def readme(state: State = DEFAULT_STATE, checkpoint: Checkpoint = DEFAULT_CHECKPOINT) -> None:
    """Write the checkpoint's README.md from the curve and the measures in STATE."""
    write_readme(checkpoint, state, SEED)


@app.command()
def draft(
    state: State = DEFAULT_STATE,
    checkpoint: Checkpoint = DEFAULT_CHECKPOINT,
    seed: Annotated[int, typer.Option(help="Seed of the documents and their order.")] = Settings.seed,
    n_steps: Annotated[int, typer.Option(help="Optimiser steps.")] = Settings.n_steps,
    n_questions: NQuestions = 60,
    threads: Threads = 1,
) -> None:
    """Train the NextN draft layer on the finished target, resuming from STATE/draft, and write it into CHECKPOINT."""
    torch.set_num_threads(threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(checkpoint)
    trainer = DraftTrainer(checkpoint, tokenizer, Settings(seed=seed, n_steps=n_steps), state / "draft")
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


def _keep(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
