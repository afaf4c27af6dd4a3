"""Training of the NextN draft layer on the frozen target: what the target says, chains of drafts, the loop."""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.optim import AdamW
from transformers import DeepseekV4ForCausalLM, PreTrainedTokenizerFast

from . import attention
from .documents import ANSWER_WEIGHT, Batch, Document, Writer
from .draft_checkpoint import backbone_digest
from .export import load_exported
from .nextn import Anchors, Drafter, NextN


@dataclass(frozen=True)
class Settings:
    """How the draft is trained. A lesson's documents depend on the seed and the lesson's number alone."""

    seed: int = 0
    n_lessons: int = 160  # batches that the target reads
    n_exams: int = 4  # more of them, never trained on
    n_steps: int = 700  # each over one lesson, in a new order every time round
    n_single_steps: int = 160  # first only one token is drafted, then chains of `depth`
    depth: int = 3
    n_tokens: int = 512  # of one document, a multiple of the window
    n_documents: int = 8  # in one lesson
    text_share: float = 0.1  # of the positions outside answers, how many start a chain
    text_weight: float = 0.1  # of a drafted token outside answers; one inside has weight 1
    depth_decay: float = 0.8  # the weight of the next drafted token
    peak_lr: float = 6e-3
    final_lr: float = 1e-5
    n_warmup: int = 30
    decay_share: float = 0.6
    curve_every: int = 50
    checkpoint_every: int = 100


MIXTURE: dict[str, float] = {"few_shot": 0.5, "local_only": 0.35, "chat": 0.15}


@dataclass(frozen=True)
class Lesson:
    """What the target says about one batch, and which chains are drafted over it."""

    ids: Tensor  # [B, S]
    weights: Tensor  # [B, S]: how much a drafted token counts
    streams: Tensor  # [B, S, N, D]
    logits: Tensor  # [B, S, V], fp16 to keep many
    anchors: Anchors


class Teacher:
    """The frozen target, with the streams before its head collapse."""

    def __init__(self, model: DeepseekV4ForCausalLM) -> None:
        self.model = model.eval().requires_grad_(False)
        self.model.config._attn_implementation = attention.NAME
        self._streams = torch.empty(0)
        self.model.model.hc_head.register_forward_pre_hook(self._keep_streams)

    @torch.no_grad()
    def lesson(self, batch: Batch, settings: Settings, generator: torch.Generator) -> Lesson:
        no_mask = torch.zeros(len(batch.ids), 1, batch.ids.shape[1], 0)
        logits = self.model(input_ids=batch.ids, attention_mask={"window": no_mask}, use_cache=False).logits
        answer = batch.weights >= ANSWER_WEIGHT
        weights = torch.where(answer, 1.0, settings.text_weight) * (batch.weights > 0)
        # a chain from p is given token p + 1 and first drafts token p + 2
        drafted = F.pad(weights[:, 2:], (0, 2))
        in_answer = F.pad(answer[:, 1:], (0, 1)) & F.pad(answer[:, 2:], (0, 2))
        elsewhere = torch.rand(batch.ids.shape, generator=generator) < settings.text_share
        documents, positions = ((in_answer | elsewhere) & (drafted > 0)).nonzero(as_tuple=True)
        return Lesson(batch.ids, weights, self._streams, logits.half(), Anchors(documents, positions))

    def _keep_streams(self, _module: object, inputs: tuple[Tensor]) -> None:
        self._streams = inputs[0]


class DraftTrainer:
    """Distils the target's next-token distributions into chains of drafts; can go on from its last checkpoint."""

    def __init__(self, target: Path, tokenizer: PreTrainedTokenizerFast, settings: Settings, folder: Path) -> None:
        self.settings, self.folder = settings, folder
        self.target_digest = backbone_digest(target)
        model = load_exported(target)
        self.teacher = Teacher(model)
        torch.manual_seed(settings.seed)
        self.layer = NextN.beside(model, json.loads((target / "config.json").read_text()))
        self.drafter = Drafter(self.layer, model)
        self.writer = Writer(tokenizer, random.Random(0))
        self.pad_id = int(tokenizer.pad_token_id)
        self.optimizer = AdamW(self.layer.parameters(), lr=settings.peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
        self.step, self.seconds = 0, 0.0
        self.curve: list[dict[str, float]] = []
        self._checkpoint = folder / "checkpoint.pt"

    def resume(self) -> bool:
        """Goes on from the last checkpoint, if there is one of this target and these settings."""
        if not self._checkpoint.exists():
            return False
        state = torch.load(self._checkpoint, weights_only=True)
        if state["target"] != self.target_digest or state["settings"] != repr(self.settings):
            return False
        self.layer.load_state_dict(state["layer"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds, self.curve = state["step"], state["seconds"], state["curve"]
        return True

    def save(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        state = {
            "target": self.target_digest,
            "settings": repr(self.settings),
            "layer": self.layer.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._checkpoint)
        (self.folder / "curve.json").write_text(json.dumps(self.curve, indent=1) + "\n")

    def run(self, until: int | None = None) -> None:
        """Trains up to step `until`, else to the end, with a bar, a row of the curve now and then, and checkpoints."""
        settings = self.settings
        end = settings.n_steps if until is None else until
        if self.step >= end:
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        rows: list[dict[str, float]] = []
        with Progress(*columns, refresh_per_second=0.5) as progress:
            numbers = range(settings.n_lessons + settings.n_exams)
            lessons = [self._lesson(number) for number in progress.track(numbers, description="target reads")]
            exams = lessons[settings.n_lessons :]
            bar = progress.add_task("draft learns", total=end, completed=self.step)
            while self.step < end:
                started = time.perf_counter()
                rows.append(self._train_step(lessons[self._lesson_of(self.step)]))
                self.step += 1
                self.seconds += time.perf_counter() - started
                progress.update(bar, completed=self.step)
                if self.step % settings.curve_every == 0 or self.step == end:
                    row = _means(rows) | _means([self._exam(exam) for exam in exams])
                    row |= {"step": self.step, "minutes": round(self.seconds / 60, 1)}
                    self.curve.append(row)
                    progress.console.print(" ".join(f"{key} {value}" for key, value in row.items()), soft_wrap=True)
                    rows = []
                if self.step % settings.checkpoint_every == 0 or self.step == end:
                    self.save()

    def _lesson(self, number: int) -> Lesson:
        settings = self.settings
        rng = random.Random(f"draft-{settings.seed}-{number}")
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.writer.rng = rng
        kinds = rng.choices(list(MIXTURE), list(MIXTURE.values()), k=settings.n_documents)
        write: list[Callable[[int], Document]] = [getattr(self.writer, kind) for kind in kinds]
        batch = Batch.of([one(settings.n_tokens) for one in write], settings.n_tokens, self.pad_id)
        return self.teacher.lesson(batch, settings, generator)

    def _lesson_of(self, step: int) -> int:
        """Which lesson a step takes: all of them once, in random order, before any comes again."""
        turn, place = divmod(step, self.settings.n_lessons)
        order = list(range(self.settings.n_lessons))
        random.Random(f"draft-order-{self.settings.seed}-{turn}").shuffle(order)
        return order[place]

    def _train_step(self, lesson: Lesson) -> dict[str, float]:
        settings = self.settings
        for group in self.optimizer.param_groups:
            group["lr"] = _learning_rate(settings, self.step)
        depth = 1 if self.step < settings.n_single_steps else settings.depth
        drafts = self.drafter.chains(lesson.ids, lesson.streams, lesson.anchors, depth)
        loss, report = chain_loss(lesson, drafts, settings.depth_decay)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.layer.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss.item()} | report

    @torch.no_grad()
    def _exam(self, lesson: Lesson) -> dict[str, float]:
        """What an unseen lesson says, with chains of full depth."""
        drafts = self.drafter.chains(lesson.ids, lesson.streams, lesson.anchors, self.settings.depth)
        _, report = chain_loss(lesson, drafts, self.settings.depth_decay)
        return {f"exam_{key}": value for key, value in report.items()}


def chain_loss(lesson: Lesson, drafts: Sequence[Tensor], decay: float) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy of the drafted distributions against the target's, and how often greedy choices agree in answers.

    `accept` is 1 plus the mean number of leading drafts, of chains that start in an answer, that the target chooses.
    """
    b, p, last = lesson.anchors.documents, lesson.anchors.positions, lesson.ids.shape[1] - 1
    total, weight_sum = torch.zeros(()), torch.zeros(())
    standing = torch.ones(len(b), dtype=torch.bool)
    in_answer = lesson.weights[b, (p + 2).clamp(max=last)] == 1
    n_standing = 0.0
    report = {}
    for step, logits in enumerate(drafts):
        said = lesson.logits[b, (p + step + 1).clamp(max=last)].float()
        weights = lesson.weights[b, (p + step + 2).clamp(max=last)] * (p + step + 2 <= last)
        losses = -(said.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        total = total + decay**step * (losses * weights).sum()
        weight_sum = weight_sum + decay**step * weights.sum()
        agree = logits.argmax(-1) == said.argmax(-1)
        report[f"draft{step + 1}"] = agree[weights == 1].float().mean().item()
        standing &= agree
        n_standing += standing[in_answer].float().mean().item()
    return total / weight_sum, report | {"accept": 1 + n_standing}


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of every key over the rows that have the last row's keys."""
    alike = [row for row in rows if row.keys() == rows[-1].keys()]
    return {key: round(sum(row[key] for row in alike) / len(alike), 4) for key in rows[-1]}


def _learning_rate(settings: Settings, step: int) -> float:
    """Warm up, hold, then a cosine down over the last `decay_share` of the run."""
    if step < settings.n_warmup:
        return settings.peak_lr * (step + 1) / settings.n_warmup
    start = (1 - settings.decay_share) * settings.n_steps
    progress = max(0.0, step - start) / max(1.0, settings.n_steps - start)
    return settings.final_lr + (settings.peak_lr - settings.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
