"""The loop that both trainings run: learning rate, one step after another, the curve, checkpoints to resume from."""

import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import AdamW

Row = dict[str, float]


@dataclass(frozen=True)
class Schedule:
    """How long and how fast is trained: warm up, hold, then a cosine down over the last `decay_share` of the run."""

    n_steps: int
    peak_lr: float = 3e-3
    final_lr: float = 1e-4
    n_warmup: int = 60
    decay_share: float = 0.3
    curve_every: int = 50
    checkpoint_every: int = 50

    def learning_rate(self, step: int) -> float:
        if step < self.n_warmup:
            return self.peak_lr * (step + 1) / self.n_warmup
        start = (1 - self.decay_share) * self.n_steps
        progress = max(0.0, step - start) / max(1.0, self.n_steps - start)
        return self.final_lr + (self.peak_lr - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, refresh_per_second=0.5)


class OtherRecipe(ValueError):
    """A folder holds the state of another run."""


class TrainingLoop(ABC):
    """Trains `module`. A step depends on the seed, its number and the weights alone, so that a run can be resumed.

    `folder` gets checkpoint.pt and curve.json; only a checkpoint of the same recipe is resumed.
    """

    def __init__(self, module: nn.Module, optimizer: AdamW, schedule: Schedule, folder: Path) -> None:
        self.module, self.optimizer, self.schedule = module, optimizer, schedule
        self.step, self.seconds = 0, 0.0
        self.curve: list[Row] = []
        self._folder, self._checkpoint = folder, folder / "checkpoint.pt"

    @property
    @abstractmethod
    def phase(self) -> str:
        """What the progress bar says of the next step."""

    @abstractmethod
    def recipe(self) -> str:
        """Everything that the weights after the steps so far depend on."""

    @abstractmethod
    def train_step(self) -> Row:
        """One optimiser step; returns what the next row of the curve is made from."""

    @abstractmethod
    def curve_row(self, reports: Sequence[Row]) -> Row:
        """The row of the curve over the steps that gave `reports`."""

    def resume(self) -> bool:
        """Goes on from the last checkpoint, if there is one.

        Raises `OtherRecipe` if the steps that led to it are not those that this run would take.
        """
        if not self._checkpoint.exists():
            return False
        state = torch.load(self._checkpoint, weights_only=True)
        self.step = state["step"]
        if state.get("recipe") != self.recipe():
            raise OtherRecipe(f"{self._checkpoint} comes from other steps than this run takes: name another folder")
        self.module.load_state_dict(state["module"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.seconds, self.curve = state["seconds"], state["curve"]
        return True

    def save(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": self.recipe(),
            "module": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
        }
        partial = self._checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._checkpoint)
        (self._folder / "curve.json").write_text(json.dumps(self.curve, indent=1) + "\n")

    def run(self, until: int | None = None) -> None:
        """Trains up to step `until`, else to the end, with a bar, a row of the curve now and then, and checkpoints."""
        end = self.schedule.n_steps if until is None else until
        reports: list[Row] = []
        with progress_bar() as progress:
            bar = progress.add_task(self.phase, total=end, completed=self.step)
            while self.step < end:
                started = time.perf_counter()
                reports.append(self.train_step())
                self.step += 1
                self.seconds += time.perf_counter() - started
                progress.update(bar, completed=self.step, description=self.phase)
                if self.step % self.schedule.curve_every == 0 or self.step == end:
                    times = {"step": self.step, "minutes": round(self.seconds / 60, 1)}
                    self.curve.append(self.curve_row(reports) | times)
                    text = " ".join(f"{key} {value}" for key, value in self.curve[-1].items())
                    progress.console.print(text, soft_wrap=True)
                    reports = []
                if self.step % self.schedule.checkpoint_every == 0 or self.step == end:
                    self.save()

    def learning_rate(self) -> float:
        """Of the next step."""
        return self.schedule.learning_rate(self.step)

    def optimise(self, loss: Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
