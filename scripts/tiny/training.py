"""The training loop: stages, one optimiser step, checkpoints and the curve."""

import json
import math
import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.optim import AdamW
from transformers import DeepseekV4ForCausalLM, PreTrainedTokenizerFast

from . import attention
from .documents import ANSWER, PRICE_VALUE, VALUE_MARK, WEIGHT_VALUE, Batch, Document, Writer
from .model import Controls, IndexerMode, build_model


@dataclass(frozen=True)
class Stage:
    """A stretch of the curriculum. `mixture` and `modes` are relative frequencies."""

    name: str
    n_steps: int
    n_tokens: int  # of one document, a multiple of the window
    n_documents: int  # in one batch
    mixture: dict[str, float]
    modes: dict[IndexerMode, float]
    window: int = 64
    heavy_rate: int = 128
    recall_help: float = 0.0  # weight of the loss that reads a fact straight off the attention output
    most_prices: int = 4
    most_weights: int = 2


@dataclass
class Curve:
    """What training logged: one row every `every` steps."""

    every: int = 50
    rows: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    seed: int
    folder: Path
    peak_lr: float = 3e-3
    final_lr: float = 1e-4
    n_warmup: int = 60
    decay_share: float = 0.3
    checkpoint_every: int = 100


def learning_rate(settings: Settings, step: int, n_steps: int) -> float:
    """Warm up, hold, then a cosine down over the last `decay_share` of the run."""
    if step < settings.n_warmup:
        return settings.peak_lr * (step + 1) / settings.n_warmup
    start = (1 - settings.decay_share) * n_steps
    if step < start:
        return settings.peak_lr
    progress = (step - start) / max(1.0, n_steps - start)
    return settings.final_lr + (settings.peak_lr - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


class Trainer:
    """Trains through `stages`. A step depends on the seed, its number and the weights alone, so a run can resume."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stages: tuple[Stage, ...], settings: Settings) -> None:
        self.stages, self.settings = stages, settings
        self.pad_id = tokenizer.pad_token_id
        self.writer = Writer(tokenizer, random.Random(0))
        self.model = build_model(len(tokenizer), settings.seed).train()
        self.model.config._attn_implementation = attention.NAME
        self.controls = Controls(self.model)
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = AdamW(groups, lr=settings.peak_lr, betas=(0.9, 0.95), eps=1e-9)
        self.step, self.seconds = 0, 0.0
        self.curve = Curve()
        self.checkpoint_path = settings.folder / "checkpoint.pt"

    @property
    def n_steps(self) -> int:
        return sum(stage.n_steps for stage in self.stages)

    def resume(self) -> bool:
        """Continue from the last checkpoint, if there is one."""
        if not self.checkpoint_path.exists():
            return False
        state = torch.load(self.checkpoint_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.curve = state["step"], state["seconds"], Curve(**state["curve"])
        return True

    def save(self) -> None:
        self.settings.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": asdict(self.curve),
        }
        partial = self.checkpoint_path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint_path)
        (self.settings.folder / "curve.json").write_text(json.dumps(self.curve.rows, indent=1) + "\n")

    def stage_of(self, step: int) -> Stage:
        for stage in self.stages:
            if step < stage.n_steps:
                return stage
            step -= stage.n_steps
        return self.stages[-1]

    def run(self, console: Console, on_checkpoint: Callable[["Trainer"], None] = lambda trainer: None) -> None:
        """Train to the end of the last stage, printing every row of the curve to `console`."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        totals: dict[str, float] = {}
        with Progress(*columns, console=console, refresh_per_second=0.5) as progress:
            bar = progress.add_task("training", total=self.n_steps, completed=self.step)
            while self.step < self.n_steps:
                started = time.perf_counter()
                for name, value in self._train_step().items():
                    totals[name] = totals.get(name, 0.0) + value
                self.step += 1
                self.seconds += time.perf_counter() - started
                progress.update(bar, completed=self.step, description=self.stage_of(self.step).name)
                if self.step % self.curve.every == 0:
                    row = _summary(totals) | {"step": self.step, "minutes": round(self.seconds / 60, 1)}
                    self.curve.rows.append(row)
                    console.print(" ".join(f"{key} {value}" for key, value in row.items()))
                    totals = {}
                if self.step % self.settings.checkpoint_every == 0 or self.step == self.n_steps:
                    self.save()
                    on_checkpoint(self)

    def _train_step(self) -> dict[str, float]:
        """One optimiser step; returns sums to average over a row of the curve."""
        stage = self.stage_of(self.step)
        rng = random.Random(f"{self.settings.seed}-{self.step}")
        self.writer.rng = rng
        batch = Batch.of([self._document(stage, rng) for _ in range(stage.n_documents)], stage.n_tokens, self.pad_id)
        (mode,) = rng.choices(list(stage.modes), list(stage.modes.values()))
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.step, self.n_steps)

        self.controls.set_reach(stage.window, stage.heavy_rate)
        self.controls.set_mode(mode)
        self.controls.hide_over(batch.hidden)
        logits = forward(self.model, batch.ids)[:, :-1]
        targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
        loss = (losses * weights).sum() / weights.sum()
        sums = {"n": 1.0, "loss": loss.item()}
        loss = loss + stage.recall_help * self._recall_loss(batch)
        if mode is IndexerMode.TEACH:
            # the query at t predicts t + 1, so it counts as much as the token that it predicts
            lesson = self.controls.lesson(F.pad(weights, (0, 1)))
            loss = loss + lesson
            sums |= {"n_lesson": 1.0, "lesson": lesson.item()}
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return sums | _hits(logits.argmax(-1) == targets, batch.marks[:, 1:])

    def _recall_loss(self, batch: Batch) -> Tensor:
        """Help for recalled values: read them through the head right off the attention, and aim it.

        Without it HCA finds nothing, and names get confused, for hundreds of steps.
        """
        loss = torch.zeros(())
        for fact, mark in VALUE_MARK.items():
            recalled = batch.marks[:, 1:] == mark
            outputs = self.controls.take_outputs(fact)
            if not recalled.any():
                continue
            for output in outputs:
                logits = self.model.lm_head(self.model.model.norm(output[:, :-1][recalled]))
                loss = loss + F.cross_entropy(logits, batch.ids[:, 1:][recalled]) / len(outputs)
            rows, queries = recalled.nonzero(as_tuple=True)
            loss = loss + self.controls.aim_loss(fact, rows, queries, batch.sources[rows, queries + 1])
        return loss

    def _document(self, stage: Stage, rng: random.Random) -> Document:
        (kind,) = rng.choices(list(stage.mixture), list(stage.mixture.values()))
        match kind:
            case "price_quiz":
                return self.writer.price_quiz(stage.n_tokens, stage.most_prices, stage.window)
            case "weight_quiz":
                return self.writer.weight_quiz(stage.n_tokens, stage.most_weights, stage.heavy_rate)
            case _:
                return getattr(self.writer, kind)(stage.n_tokens)


def forward(model: DeepseekV4ForCausalLM, ids: Tensor) -> Tensor:
    """Logits [B, S, V] with banded attention, which brings its own window mask and reads no other."""
    no_mask = torch.zeros(ids.shape[0], 1, ids.shape[1], 0)
    return model(input_ids=ids, attention_mask={"window": no_mask}, use_cache=False).logits


_MARK_NAMES = {ANSWER: "answer", PRICE_VALUE: "price", WEIGHT_VALUE: "weight"}


def _hits(right: Tensor, marks: Tensor) -> dict[str, float]:
    sums: dict[str, float] = {}
    for mark, name in _MARK_NAMES.items():
        chosen = marks == mark
        sums[f"n_{name}"] = float(chosen.sum())
        sums[name] = float((right & chosen).sum())
    return sums


def _summary(totals: dict[str, float]) -> dict[str, float]:
    """Averages: each sum over its own count, `loss` over the steps."""
    row = {"loss": round(totals["loss"] / totals["n"], 4)}
    for name in ("answer", "price", "weight", "lesson"):
        if totals.get(f"n_{name}"):
            row[name] = round(totals[name] / totals[f"n_{name}"], 4)
    return row
