"""Training of the target through the stages of the curriculum."""

import hashlib
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast

from . import attention
from .conversations import CALL, RESULT, SUM, TALK, ConversationWriter
from .documents import ANSWER, PRICE_VALUE, VALUE_MARK, WEIGHT_VALUE, Batch, Document
from .loop import Row, Schedule, TrainingLoop
from .model import Controls, IndexerMode, build_model, raw_config
from .tokenizer import meanings

N_WARMUP = 60
MARKS = {
    ANSWER: "answer",
    PRICE_VALUE: "price",
    WEIGHT_VALUE: "weight",
    SUM: "sum",
    CALL: "call",
    RESULT: "result",
    TALK: "talk",
}
"""Names in the curve."""


@dataclass(frozen=True)
class Stage:
    """A stretch of the curriculum. `mixture` and `modes` are relative frequencies."""

    name: str
    n_steps: int
    mixture: dict[str, float]
    n_tokens: int = 512  # of one document, a multiple of the window
    n_documents: int = 4  # in one batch
    modes: dict[IndexerMode, float] = field(default_factory=lambda: {IndexerMode.DENSE: 1.0})
    window: int = 64
    heavy_rate: int = 128
    recall_help: float = 0.2  # weight of the loss that reads a fact straight off the attention output
    most_prices: int = 5
    most_weights: int = 2
    lr: float = 3e-3
    last_lr: float | None = None  # where the learning rate ends, along a cosine; without it, it stays
    # share of the steps with the roundings of --numerics official; the rest are plain, so that the weights fit both
    rounded: float = field(default=0.0, repr=False)

    def __str__(self) -> str:
        """All that the stage says. Without roundings as before there were any, so that older runs can go on."""
        return f"{self!r} rounded={self.rounded}" if self.rounded else repr(self)

    def learning_rate(self, step: int) -> float:
        """At step `step` of the stage."""
        if self.last_lr is None:
            return self.lr
        return self.last_lr + (self.lr - self.last_lr) * 0.5 * (1 + math.cos(math.pi * step / self.n_steps))


class StepPlan(NamedTuple):
    """The documents of a step, how it uses the indexer, and whether its rows are rounded."""

    batch: Batch
    mode: IndexerMode
    rounded: bool


class Trainer(TrainingLoop):
    """Trains a new target through `stages`."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stages: Sequence[Stage], seed: int, folder: Path) -> None:
        self.stages, self.seed = stages, seed
        self.pad_id = int(tokenizer.pad_token_id)
        self.writer = ConversationWriter(tokenizer, random.Random(0))
        self.model = build_model(len(tokenizer), seed, meanings(tokenizer)).train()
        self.model.set_attn_implementation(attention.NAME)
        self.controls = Controls(self.model)
        schedule = Schedule(sum(stage.n_steps for stage in stages))
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
        optimizer = AdamW(groups, lr=schedule.peak_lr, betas=(0.9, 0.95), eps=1e-9)
        super().__init__(self.model, optimizer, schedule, folder)

    @property
    def stage(self) -> Stage:
        """The stage of the next step; the last one at the end of the run."""
        return self._place()[0]

    def recipe(self) -> str:
        """The stages of the steps so far, and a digest of the model's configuration and of documents of each stage.

        Stages of later steps may still change, so that they can be planned while the first ones run.
        """
        digest = hashlib.sha256(repr((self.seed, raw_config(self.writer.vocab_size))).encode())
        begun, start = [], 0
        for stage in self.stages:
            if start >= self.step:
                break
            begun.append(str(stage))
            digest.update(self.plan(stage, start).batch.ids.numpy().tobytes())
            start += stage.n_steps
        return "\n".join([digest.hexdigest(), *begun])

    def learning_rate(self) -> float:
        stage, step = self._place()
        return stage.learning_rate(step) * min(1.0, (self.step + 1) / N_WARMUP)

    def _place(self) -> tuple[Stage, int]:
        """The stage of the next step, and how many of its steps are done."""
        step = self.step
        for stage in self.stages:
            if step < stage.n_steps:
                return stage, step
            step -= stage.n_steps
        return self.stages[-1], self.stages[-1].n_steps

    @property
    def phase(self) -> str:
        return self.stage.name

    def train_step(self) -> Row:
        """One optimiser step; returns sums to average over a row of the curve."""
        stage = self.stage
        batch, mode, rounded = self.plan(stage, self.step)
        self.controls.set_up(stage.window, stage.heavy_rate, mode, rounded=rounded)
        self.controls.hide_over(batch.hidden)
        logits = attention.banded_logits(self.model, batch.ids)[:, :-1]
        targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(weights)
        loss = (losses * weights).sum() / weights.sum()
        sums = {"n_loss": 1.0, "loss": loss.item()}
        if rounded:
            sums |= {"n_rounded": 1.0, "rounded": loss.item()}
        loss = loss + stage.recall_help * self._recall_loss(batch)
        if mode is IndexerMode.TEACH:
            # the query at t predicts t + 1, so it counts as much as the token that it predicts
            lesson = self.controls.lesson(F.pad(weights, (0, 1)))
            loss = loss + lesson
            sums |= {"n_lesson": 1.0, "lesson": lesson.item()}
        self.optimise(loss)
        right = logits.argmax(-1) == targets
        for mark, name in MARKS.items():
            chosen = batch.marks[:, 1:] == mark
            sums |= {f"n_{name}": float(chosen.sum()), name: float((right & chosen).sum())}
        return sums

    def curve_row(self, reports: Sequence[Row]) -> Row:
        """Averages: each sum over its own count, `loss` over the steps, `rounded` over the rounded ones."""

        def total(name: str) -> float:
            return sum(report.get(name, 0.0) for report in reports)

        names = ("loss", "rounded", *MARKS.values(), "lesson")
        return {name: round(total(name) / total(f"n_{name}"), 4) for name in names if total(f"n_{name}")}

    def _recall_loss(self, batch: Batch) -> Tensor:
        """Help for recalled values: read them through the head right off the attention, and aim it.

        Without it HCA finds nothing, and names get confused, for hundreds of steps.
        """
        loss = torch.zeros(())
        for fact, mark in VALUE_MARK.items():
            recalled = batch.marks[:, 1:] == mark
            if not recalled.any():
                continue
            outputs = self.controls.outputs(fact)
            for output in outputs:
                logits = self.model.lm_head(self.model.model.norm(output[:, :-1][recalled]))
                loss = loss + F.cross_entropy(logits, batch.ids[:, 1:][recalled]) / len(outputs)
            rows, queries = recalled.nonzero(as_tuple=True)
            loss = loss + self.controls.aim_loss(fact, rows, queries, batch.sources[rows, queries + 1])
        return loss

    def plan(self, stage: Stage, step: int) -> StepPlan:
        """What a step does: the seed and its number decide."""
        rng = random.Random(f"{self.seed}-{step}")
        self.writer.rng = rng
        documents = [self._document(stage, rng) for _ in range(stage.n_documents)]
        (mode,) = rng.choices(list(stage.modes), list(stage.modes.values()))
        return StepPlan(Batch.of(documents, stage.n_tokens, self.pad_id), mode, rng.random() < stage.rounded)

    def _document(self, stage: Stage, rng: random.Random) -> Document:
        (kind,) = rng.choices(list(stage.mixture), list(stage.mixture.values()))
        match kind:
            case "price_quiz":
                return self.writer.price_quiz(stage.n_tokens, stage.most_prices, stage.window)
            case "weight_quiz":
                return self.writer.weight_quiz(stage.n_tokens, stage.most_weights, stage.heavy_rate)
            case _:
                return self.writer.write(kind, stage.n_tokens)
