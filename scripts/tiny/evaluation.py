"""Accuracy on held-out problems, healthy and with one piece of the prompt's state zeroed before the decode."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from evaluation.questions import completion_prompt
from rich.table import Table as RichTable
from torch import Tensor
from transformers import DeepseekV4ForCausalLM, DynamicCache, PreTrainedTokenizerFast
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from .problems import Fact, Problem

MOST_NEW_TOKENS = 32
KNOCK_OUTS = ("healthy", "swa", "c4_kv", "c4_index", "c128_kv")
"""What is zeroed in one row of a prompt's cache, under the name that the handover gives that state."""

COLUMNS: dict[str, Callable[[Problem], bool]] = {
    "all": lambda problem: True,
    "local": lambda problem: problem.kind == "local",
    "far": lambda problem: problem.kind == "far",
    "far, price": lambda problem: problem.fact is Fact.PRICE,
    "far, weight": lambda problem: problem.fact is Fact.WEIGHT,
}


@dataclass(frozen=True)
class Accuracies:
    """Share of exactly right answers, for every knock-out (row) on every kind of problem (column)."""

    n_problems: int
    rows: dict[str, dict[str, float]]

    def rendered(self) -> RichTable:
        table = RichTable("state zeroed", *COLUMNS, title=f"exact answers of {self.n_problems} held-out problems")
        for name, row in self.rows.items():
            table.add_row(name, *(f"{row[column]:.3f}" for column in COLUMNS))
        return table


@torch.no_grad()
def evaluate(
    model: DeepseekV4ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tests: Sequence[Problem],
    shots: Sequence[Problem],
    n_shots: int,
    seed: int,
    on_problem: Callable[[], None],
) -> Accuracies:
    """Asks every test problem after `n_shots` random shots, with every knock-out; only the final number must match."""
    rng = random.Random(seed)
    stop_ids = ends_of_answers(tokenizer)
    right: dict[str, list[bool]] = {name: [] for name in KNOCK_OUTS}
    for asked in tests:
        prompt = tokenizer(completion_prompt(asked, rng.sample(shots, n_shots)), return_tensors="pt").input_ids
        cache = DynamicCache(config=model.config)
        logits = model(input_ids=prompt, cache=cache, logits_to_keep=1).logits
        cache.reorder_cache(torch.zeros(len(KNOCK_OUTS), dtype=torch.long))  # one row for each knock-out
        for row, name in enumerate(KNOCK_OUTS):
            knock_out(cache, row, name)
        answers = greedy(model, logits.expand(len(KNOCK_OUTS), -1, -1), cache, stop_ids)
        for name, ids in zip(KNOCK_OUTS, answers, strict=True):
            right[name].append(final_number(tokenizer.decode(ids)) == final_number(asked.answer))
        on_problem()
    chosen = {column: [among(problem) for problem in tests] for column, among in COLUMNS.items()}
    rows = {
        name: {column: _mean(list(itertools.compress(rights, chosen[column]))) for column in COLUMNS}
        for name, rights in right.items()
    }
    return Accuracies(len(tests), rows)


def ends_of_answers(tokenizer: PreTrainedTokenizerFast) -> set[int]:
    """The end of a text, and every token with a line break in it: some write two at once."""
    lines = (token for token in range(len(tokenizer)) if "\n" in tokenizer.decode([token]))
    return {int(tokenizer.eos_token_id), *lines}


def knock_out(cache: DynamicCache, row: int, name: str) -> None:
    """Zeroes one piece of state in one row."""
    for layer in cache.layers:
        sparse = isinstance(layer, DeepseekV4CSACache)
        heavy = isinstance(layer, DeepseekV4HCACache) and not sparse
        match name:
            case "swa":
                layer.keys[row] = 0.0
                layer.values = layer.keys
            case "c4_kv" if sparse:
                _zero_entries(layer.compressed_kv["compressor"], row)
            case "c4_index" if sparse:
                _zero_entries(layer.compressed_kv["indexer"], row)
            case "c128_kv" if heavy:
                _zero_entries(layer.compressed_kv["compressor"], row)


def _zero_entries(entries: Tensor | None, row: int) -> None:
    if entries is not None:
        entries[row] = 0.0


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


def final_number(answer: str) -> str | None:
    """What follows the last `#### `, or None where nothing does."""
    _, marker, number = answer.rpartition("#### ")
    return number.strip() if marker else None


def _mean(rights: Sequence[bool]) -> float:
    return sum(rights) / len(rights) if rights else float("nan")
