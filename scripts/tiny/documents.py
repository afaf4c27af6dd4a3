"""Training documents: token ids with a loss weight and a mark for every token."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .problems import (
    Fact,
    Problem,
    Span,
    Split,
    any_problem,
    filler_sentence,
    local_problem,
    price_ask,
    price_facts,
    weight_ask,
    weight_fact,
)
from .tokenizer import ASSISTANT, BOS, END_THINK, EOS, USER
from .words import GOODS, METALS

ANSWER_WEIGHT, VALUE_WEIGHT, TEXT_WEIGHT = 1.0, 2.0, 0.1
# Marks: what a token is, for the curves.
TEXT, ANSWER, PRICE_VALUE, WEIGHT_VALUE = range(4)
VALUE_MARK = {Fact.PRICE: PRICE_VALUE, Fact.WEIGHT: WEIGHT_VALUE}


@dataclass
class Document:
    """One training sequence. `hidden` marks the tokens whose CSA entries must not be trusted."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    hidden: list[bool] = field(default_factory=list)
    stated: list[tuple[str, int]] = field(
        default_factory=list
    )  # of every fact what it is about, and where its value is
    recalled: list[tuple[str, int]] = field(default_factory=list)  # the same of every recalled value

    def append(self, ids: list[int], weight: float = TEXT_WEIGHT, mark: int = TEXT, *, hidden: bool = False) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)
        self.marks += [mark] * len(ids)
        self.hidden += [hidden] * len(ids)

    def extend(self, other: "Document") -> None:
        start = len(self.ids)
        self.stated += [(about, start + position) for about, position in other.stated]
        self.recalled += [(about, start + position) for about, position in other.recalled]
        self.ids += other.ids
        self.weights += other.weights
        self.marks += other.marks
        self.hidden += other.hidden

    def sources(self, n_tokens: int) -> list[int]:
        """For every recalled value the position of the latest fact it comes from; -1 for every other token."""
        sources = [-1] * n_tokens
        for about, position in self.recalled:
            if position < n_tokens:
                sources[position] = max(at for name, at in self.stated if name == about and at < position)
        return sources


class Writer:
    """Writes documents with a tokenizer; every method returns one of at most `n_tokens` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self.rng = rng
        self.vocab_size = len(tokenizer)
        self.encode: Callable[[str], list[int]] = lru_cache(maxsize=100_000)(
            lambda text: tokenizer.encode(text, add_special_tokens=False)
        )

    def few_shot(self, n_tokens: int) -> Document:
        """Problems in the few-shot form, as many as fit."""
        return self._fill(n_tokens, lambda: self._completion(any_problem(self.rng, Split.STREAM)))

    def local_only(self, n_tokens: int) -> Document:
        def local() -> Problem:
            while Split.owner((made := local_problem(self.rng)).question) is not Split.STREAM:
                pass
            return made

        return self._fill(n_tokens, lambda: self._completion(local()))

    def drill(self, n_tokens: int) -> Document:
        """Sums and differences, one after the other, of the sizes that local problems have."""

        def equation() -> Document:
            total, change = self.rng.randint(4, 40), self.rng.randint(2, 5)
            sign, result = self.rng.choice((("+", total + change), ("-", total - change)))
            document = Document()
            document.append(self.encode(f" {total} {sign} {change} ="))
            document.append(self.encode(f" {result}"), ANSWER_WEIGHT, ANSWER)
            document.append(self.encode("."))
            return document

        return self._fill(n_tokens, equation)

    def chat(self, n_tokens: int) -> Document:
        """Turns of the chat form, one problem each, as many as fit."""
        return self._fill(n_tokens, lambda: self._turn(any_problem(self.rng, Split.STREAM)))

    def price_quiz(self, n_tokens: int, most_facts: int, window: int) -> Document:
        """Prices, a window of filler, then a question about each price."""
        facts = price_facts(self.rng, self.rng.sample(GOODS, self.rng.randint(1, most_facts)))
        opening = [span for *_, fact in facts for span in (fact, *self._filler(1, 1))]
        opening += self._filler(window - 6, window * 5 // 4)
        asks = [price_ask(self.rng, good, price) for good, price, _ in facts]
        return self._quiz(opening, asks, Fact.PRICE, n_tokens)

    def weight_quiz(self, n_tokens: int, most_facts: int, heavy_rate: int) -> Document:
        """Weights, each with an HCA entry's length of filler behind it, then a question about each weight."""
        opening = self._filler(0, heavy_rate // 2)
        asks: list[tuple[Span, str]] = []
        for metal in self.rng.sample(METALS, self.rng.randint(1, most_facts)):
            weight, fact = weight_fact(self.rng, metal)
            opening += [fact, *self._filler(heavy_rate, heavy_rate * 5 // 4)]
            asks.append(weight_ask(self.rng, metal, weight))
        return self._quiz(opening, asks, Fact.WEIGHT, n_tokens)

    def soup(self, n_tokens: int) -> Document:
        """Random tokens, so that every embedding and every output row sees a little training."""
        document = Document()
        document.append([0, *(self.rng.randrange(3, self.vocab_size) for _ in range(n_tokens - 1))], TEXT_WEIGHT / 2)
        return document

    def _filler(self, least: int, most: int) -> list[Span]:
        """Sentences of filler, in all at least a random number of tokens between `least` and `most`."""
        spans: list[Span] = []
        wanted = self.rng.randint(least, most)
        while wanted > 0:
            spans.append(Span(filler_sentence(self.rng)))
            wanted -= len(self.encode(spans[-1].text))
        return spans

    def _fill(self, n_tokens: int, write_one: Callable[[], Document]) -> Document:
        document = self._start()
        while len(document.ids) + len((part := write_one()).ids) <= n_tokens:
            document.extend(part)
        return document

    def _start(self) -> Document:
        document = Document()
        document.append(self.encode(BOS), 0.0)
        return document

    def _quiz(self, opening: list[Span], asks: list[tuple[Span, str]], fact: Fact, n_tokens: int) -> Document:
        document = self._start()
        document.extend(self._spans(opening))
        self.rng.shuffle(asks)
        for ask, answer in asks:
            part = self._completion(Problem((ask,), answer, fact))
            if len(document.ids) + len(part.ids) <= n_tokens:
                document.extend(part)
        return document

    def _spans(self, spans: list[Span] | tuple[Span, ...]) -> Document:
        document = Document()
        for span in spans:
            document.append(self.encode(span.text), hidden=span.fact is Fact.WEIGHT)
            if span.fact:
                document.stated.append((span.about, len(document.ids) - 2))  # the value stands before the full stop
        return document

    def _completion(self, made: Problem) -> Document:
        document = Document()
        document.append(self.encode("Question:"))
        document.extend(self._spans(made.spans))
        document.append(self.encode("\nAnswer:"))
        document.extend(self._answer(made))
        document.append(self.encode("\n\n"), ANSWER_WEIGHT)
        return document

    def _turn(self, made: Problem) -> Document:
        document = Document()
        document.append(self.encode(USER))
        first, *rest = made.spans
        document.extend(self._spans([replace(first, text=first.text[1:]), *rest]))
        document.append(self.encode(ASSISTANT + END_THINK))
        document.extend(self._answer(made))
        document.append(self.encode(EOS), ANSWER_WEIGHT)
        return document

    def _answer(self, made: Problem) -> Document:
        """The answer; of a `far` one the second token is the value that had to be recalled."""
        document = Document()
        ids = self.encode(" " + made.answer)
        if made.fact is None:
            document.append(ids, ANSWER_WEIGHT, ANSWER)
            return document
        document.append(ids[:1], ANSWER_WEIGHT, ANSWER)
        document.recalled.append((made.answer.split()[0], 1))
        document.append(ids[1:2], VALUE_WEIGHT, VALUE_MARK[made.fact])
        document.append(ids[2:], ANSWER_WEIGHT, ANSWER)
        return document


@dataclass(frozen=True)
class Batch:
    """Documents padded on the right; weight, mark, hidden flag and source of every token, all [B, S]."""

    ids: Tensor
    weights: Tensor
    marks: Tensor
    hidden: Tensor
    sources: Tensor

    @classmethod
    def of(cls, documents: list[Document], n_tokens: int, pad_id: int) -> "Batch":
        def stack(rows: list[list], fill: float) -> Tensor:
            return torch.tensor([row[:n_tokens] + [fill] * (n_tokens - len(row)) for row in rows])

        return cls(
            stack([document.ids for document in documents], pad_id),
            stack([document.weights for document in documents], 0.0),
            stack([document.marks for document in documents], TEXT),
            stack([document.hidden for document in documents], False),
            torch.tensor([document.sources(n_tokens) for document in documents]),
        )
