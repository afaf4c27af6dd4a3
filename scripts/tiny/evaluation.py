"""Accuracy on held-out problems, healthy and with one piece of the prompt's state zeroed before the decode."""

import copy
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


def zero_swa(cache: DynamicCache) -> None:
    for layer in cache.layers:
        layer.keys = torch.zeros_like(layer.keys)
        layer.values = layer.keys


def zero_c4_kv(cache: DynamicCache) -> None:
    _zero_entries(cache, "compressor", lambda layer: isinstance(layer, DeepseekV4CSACache))


def zero_c4_index(cache: DynamicCache) -> None:
    _zero_entries(cache, "indexer", lambda layer: isinstance(layer, DeepseekV4CSACache))


def zero_c128_kv(cache: DynamicCache) -> None:
    _zero_entries(cache, "compressor", lambda layer: not isinstance(layer, DeepseekV4CSACache))


def _zero_entries(cache: DynamicCache, name: str, chosen: Callable[[object], bool]) -> None:
    for layer in cache.layers:
        if isinstance(layer, DeepseekV4HCACache) and chosen(layer) and layer.compressed_kv[name] is not None:
            layer.compressed_kv[name] = torch.zeros_like(layer.compressed_kv[name])


# The state that a knock-out zeroes, under the name that the handover gives it.
KNOCK_OUTS: dict[str, Callable[[DynamicCache], None]] = {
    "healthy": lambda cache: None,
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
def greedy(model: DeepseekV4ForCausalLM, logits: Tensor, cache: DynamicCache, stop_ids: set[int]) -> list[int]:
    """Greedy tokens from the prompt's last `logits` [1, 1, V] and its cache, up to a stop token."""
    ids: list[int] = []
    while len(ids) < MOST_NEW_TOKENS:
        token = logits[0, -1].argmax()
        if int(token) in stop_ids:
            break
        ids.append(int(token))
        logits = model(input_ids=token.view(1, 1), cache=cache).logits
    return ids


@torch.no_grad()
def evaluate(
    model: DeepseekV4ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tests: list[Problem],
    shots: list[Problem],
    knock_outs: tuple[str, ...] = tuple(KNOCK_OUTS),
    n_shots: int = 4,
    seed: int = 0,
    on_problem: Callable[[], None] = lambda: None,
) -> list[Outcome]:
    """Ask every test problem after `n_shots` random shots, once per knock-out; only the number must match."""
    rng = random.Random(seed)
    stop_ids = {tokenizer.eos_token_id, *tokenizer.encode("\n", add_special_tokens=False)}
    outcomes: list[Outcome] = []
    for asked in tests:
        prompt = tokenizer(few_shot_prompt(rng.sample(shots, n_shots), asked), return_tensors="pt").input_ids
        filled = DynamicCache(config=model.config)
        logits = model(input_ids=prompt, cache=filled, logits_to_keep=1).logits
        for name in knock_outs:
            cache = copy.deepcopy(filled)
            KNOCK_OUTS[name](cache)
            text = tokenizer.decode(greedy(model, logits, cache, stop_ids))
            right = final_number(text) == final_number(asked.answer)
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
