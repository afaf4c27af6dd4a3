"""Accuracy on held-out problems, healthy and with one piece of the prompt's state zeroed before the decode."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from rich.table import Table as RichTable
from torch import Tensor
from transformers import DeepseekV4ForCausalLM, DynamicCache, PreTrainedTokenizerFast
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from .problems import Problem, few_shot_prompt

MOST_NEW_TOKENS = 32


def zero_swa(cache: DynamicCache, row: int) -> None:
    for layer in cache.layers:
        layer.keys[row] = 0.0
        layer.values = layer.keys


def zero_c4_kv(cache: DynamicCache, row: int) -> None:
    _zero_entries(cache, row, "compressor", lambda layer: isinstance(layer, DeepseekV4CSACache))


def zero_c4_index(cache: DynamicCache, row: int) -> None:
    _zero_entries(cache, row, "indexer", lambda layer: isinstance(layer, DeepseekV4CSACache))


def zero_c128_kv(cache: DynamicCache, row: int) -> None:
    _zero_entries(cache, row, "compressor", lambda layer: not isinstance(layer, DeepseekV4CSACache))


def _zero_entries(cache: DynamicCache, row: int, name: str, chosen: Callable[[object], bool]) -> None:
    for layer in cache.layers:
        if isinstance(layer, DeepseekV4HCACache) and chosen(layer) and layer.compressed_kv[name] is not None:
            layer.compressed_kv[name][row] = 0.0


# What a knock-out zeroes in one row of a prompt's cache, under the name that the handover gives that state.
KNOCK_OUTS: dict[str, Callable[[DynamicCache, int], None]] = {
    "healthy": lambda cache, row: None,
    "swa": zero_swa,
    "c4_kv": zero_c4_kv,
    "c4_index": zero_c4_index,
    "c128_kv": zero_c128_kv,
}


@dataclass(frozen=True)
class Outcome:
    """Whether the decoded answer to a problem was exactly right, for one knock-out."""

    knock_out: str
    kind: str
    fact: str
    right: bool


@torch.no_grad()
def greedy(model: DeepseekV4ForCausalLM, logits: Tensor, cache: DynamicCache, stop_ids: set[int]) -> list[list[int]]:
    """Greedy tokens of every row from the prompt's last `logits` [B, 1, V] and its cache, each up to a stop token."""
    columns: list[Tensor] = []
    stopped = torch.zeros(logits.shape[0], dtype=torch.bool)
    stops = torch.tensor(sorted(stop_ids))
    while len(columns) < MOST_NEW_TOKENS and not stopped.all():
        tokens = logits[:, -1].argmax(-1)
        columns.append(tokens)
        stopped |= torch.isin(tokens, stops)
        logits = model(input_ids=tokens.unsqueeze(1), cache=cache).logits
    rows = torch.stack(columns, dim=1).tolist()
    return [list(itertools.takewhile(lambda token: token not in stop_ids, row)) for row in rows]


@torch.no_grad()
def evaluate(
    model: DeepseekV4ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tests: list[Problem],
    shots: list[Problem],
    n_shots: int = 4,
    seed: int = 0,
    on_problem: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Ask every test problem after `n_shots` random shots, with every knock-out; only the final number must match."""
    rng = random.Random(seed)
    stop_ids = {tokenizer.eos_token_id, *tokenizer.encode("\n", add_special_tokens=False)}
    outcomes: list[Outcome] = []
    for asked in tests:
        prompt = tokenizer(few_shot_prompt(rng.sample(shots, n_shots), asked), return_tensors="pt").input_ids
        cache = DynamicCache(config=model.config)
        logits = model(input_ids=prompt, cache=cache, logits_to_keep=1).logits
        cache.reorder_cache(torch.zeros(len(KNOCK_OUTS), dtype=torch.long))  # one row for each knock-out
        for row, knock_out in enumerate(KNOCK_OUTS.values()):
            knock_out(cache, row)
        answers = greedy(model, logits.expand(len(KNOCK_OUTS), -1, -1), cache, stop_ids)
        for name, ids in zip(KNOCK_OUTS, answers, strict=True):
            right = final_number(tokenizer.decode(ids)) == final_number(asked.answer)
            outcomes.append(Outcome(name, asked.kind, asked.fact.value if asked.fact else "", right))
        on_problem()
    return outcomes


def final_number(answer: str) -> str | None:
    """What follows the last `#### `, or None where nothing does."""
    _, marker, number = answer.rpartition("#### ")
    return number.strip() if marker else None


COLUMNS: dict[str, Callable[[Outcome], bool]] = {
    "all": lambda outcome: True,
    "local": lambda outcome: outcome.kind == "local",
    "far": lambda outcome: outcome.kind == "far",
    "far, price": lambda outcome: outcome.fact == "price",
    "far, weight": lambda outcome: outcome.fact == "weight",
}


@dataclass(frozen=True)
class Table:
    """Accuracy of every knock-out (row) on every kind of problem (column)."""

    n_problems: int
    rows: dict[str, dict[str, float]]

    @classmethod
    def of(cls, outcomes: list[Outcome]) -> "Table":
        names = list(dict.fromkeys(outcome.knock_out for outcome in outcomes))
        rows = {
            name: {column: _accuracy(outcomes, name, chosen) for column, chosen in COLUMNS.items()} for name in names
        }
        return cls(len(outcomes) // max(1, len(names)), rows)

    def rendered(self) -> RichTable:
        table = RichTable("state zeroed", *COLUMNS, title=f"exact answers of {self.n_problems} held-out problems")
        for name, row in self.rows.items():
            table.add_row(name, *(f"{row[column]:.3f}" for column in COLUMNS))
        return table


def _accuracy(outcomes: list[Outcome], knock_out: str, chosen: Callable[[Outcome], bool]) -> float:
    rights = [outcome.right for outcome in outcomes if outcome.knock_out == knock_out and chosen(outcome)]
    return sum(rights) / len(rights) if rights else float("nan")
