"""Training of the NextN draft layer on the frozen target: what the target says, and chains of drafts over it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedTokenizerFast

from . import attention
from .checkpoint import load_exported, target_digest
from .conversations import ConversationWriter
from .documents import ANSWER_WEIGHT, Batch
from .loop import Row, Schedule, TrainingLoop, progress_bar
from .nextn import Anchors, Drafter, NextN


@dataclass(frozen=True)
class Settings(Schedule):
    """How the draft is trained. A lesson's documents depend on the seed and the lesson's number alone."""

    n_steps: int = 700  # each over one lesson, in a new order every time round
    peak_lr: float = 6e-3
    final_lr: float = 1e-5
    n_warmup: int = 30
    decay_share: float = 0.6
    seed: int = 0
    n_lessons: int = 160  # batches that the target reads
    n_exams: int = 4  # more of them, never trained on
    n_single_steps: int = 160  # first only one token is drafted, then chains of `depth`
    depth: int = 3
    n_tokens: int = 512  # of one document, a multiple of the window
    n_documents: int = 8  # in one lesson
    text_share: float = 0.1  # of the positions outside answers, how many start a chain
    text_weight: float = 0.1  # of a drafted token outside answers; one inside has weight 1
    depth_decay: float = 0.8  # the weight of the next drafted token


MIXTURE: dict[str, float] = {"few_shot": 0.4, "local_only": 0.25, "chat": 0.15, "sum_chat": 0.1, "tools": 0.1}


@dataclass(frozen=True)
class Lesson:
    """What the target says about one batch, and which chains are drafted over it."""

    ids: Tensor  # [B, S]
    weights: Tensor  # [B, S]: how much a drafted token counts
    streams: Tensor  # [B, S, N, D]
    logits: Tensor  # [B, S, V], fp16 to keep many
    anchors: Anchors


class DraftTrainer(TrainingLoop):
    """Distils the next-token distributions of the frozen target into chains of drafts."""

    phase = "draft learns"

    def __init__(self, target: Path, tokenizer: PreTrainedTokenizerFast, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.target_digest = target_digest(target)
        self.target = load_exported(target).requires_grad_(False)
        self.target.set_attn_implementation(attention.NAME)
        self.target.model.hc_head.register_forward_pre_hook(self._keep_streams)
        self._streams = torch.empty(0)
        torch.manual_seed(settings.seed)
        self.layer = NextN.beside(self.target, json.loads((target / "config.json").read_text()))
        self.drafter = Drafter(self.layer, self.target)
        self.writer = ConversationWriter(tokenizer, random.Random(0))
        self.pad_id = int(tokenizer.pad_token_id)
        self._lessons: list[Lesson] = []
        optimizer = AdamW(self.layer.parameters(), lr=settings.peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
        super().__init__(self.layer, optimizer, settings, folder)

    def recipe(self) -> str:
        return f"draft of {self.target_digest}: {self.settings} {MIXTURE}"

    def run(self, until: int | None = None) -> None:
        """Lets the target read all lessons, then trains."""
        if self.step >= (self.settings.n_steps if until is None else until):
            return
        with progress_bar() as progress:
            numbers = range(self.settings.n_lessons + self.settings.n_exams)
            self._lessons = [self._lesson(number) for number in progress.track(numbers, description="target reads")]
        super().run(until)

    def train_step(self) -> Row:
        settings = self.settings
        lesson = self._lessons[self._lesson_number()]
        depth = 1 if self.step < settings.n_single_steps else settings.depth
        loss, report = self._draft(lesson, depth)
        self.optimise(loss)
        return {"loss": loss.item()} | report

    @torch.no_grad()
    def curve_row(self, reports: Sequence[Row]) -> Row:
        """Means over the steps, and over unseen lessons with chains of full depth."""
        exams = [self._draft(lesson, self.settings.depth)[1] for lesson in self._lessons[self.settings.n_lessons :]]
        return _means(reports) | {f"exam_{key}": value for key, value in _means(exams).items()}

    def _draft(self, lesson: Lesson, depth: int) -> tuple[Tensor, Row]:
        drafts = self.drafter.chains(lesson.ids, lesson.streams, lesson.anchors, depth)
        return chain_loss(lesson, drafts, self.settings.depth_decay)

    @torch.no_grad()
    def _lesson(self, number: int) -> Lesson:
        settings = self.settings
        rng = random.Random(f"draft-{settings.seed}-{number}")
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        self.writer.rng = rng
        kinds = rng.choices(list(MIXTURE), list(MIXTURE.values()), k=settings.n_documents)
        documents = [self.writer.write(kind, settings.n_tokens) for kind in kinds]
        batch = Batch.of(documents, settings.n_tokens, self.pad_id)
        logits = attention.banded_logits(self.target, batch.ids)
        answer = batch.weights >= ANSWER_WEIGHT
        weights = torch.where(answer, 1.0, settings.text_weight) * (batch.weights > 0)
        # a chain from p is given token p + 1 and first drafts token p + 2
        drafted = F.pad(weights[:, 2:], (0, 2))
        in_answer = F.pad(answer[:, 1:], (0, 1)) & F.pad(answer[:, 2:], (0, 2))
        elsewhere = torch.rand(batch.ids.shape, generator=generator) < settings.text_share
        anchors = Anchors(*((in_answer | elsewhere) & (drafted > 0)).nonzero(as_tuple=True))
        return Lesson(batch.ids, weights, self._streams, logits.half(), anchors)

    def _keep_streams(self, _module: object, inputs: tuple[Tensor]) -> None:
        """The target's streams before its head collapses them."""
        self._streams = inputs[0]

    def _lesson_number(self) -> int:
        """The lesson of the next step: all of them once, in random order, before any comes again."""
        turn, place = divmod(self.step, self.settings.n_lessons)
        order = list(range(self.settings.n_lessons))
        random.Random(f"draft-order-{self.settings.seed}-{turn}").shuffle(order)
        return order[place]


def chain_loss(lesson: Lesson, drafts: Sequence[Tensor], decay: float) -> tuple[Tensor, Row]:
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


def _means(rows: Sequence[Row]) -> Row:
    """The mean of every key over the rows that have the last row's keys."""
    alike = [row for row in rows if row.keys() == rows[-1].keys()]
    return {key: round(sum(row[key] for row in alike) / len(alike), 4) for key in rows[-1]}
