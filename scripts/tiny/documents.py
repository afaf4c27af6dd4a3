"""Training documents: tokens with a loss weight and a mark each, and batches of them."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from .chat_format import BOS
from .problems import Fact, Problem, Span, Split, any_problem, asked, filler_sentence, local_problem, priced, stated
from .words import GOODS, METALS

ANSWER_WEIGHT, VALUE_WEIGHT, TEXT_WEIGHT = 1.0, 2.0, 0.1
# Marks: what a token is, for the curves.
TEXT, ANSWER, PRICE_VALUE, WEIGHT_VALUE = range(4)
VALUE_MARK = {Fact.PRICE: PRICE_VALUE, Fact.WEIGHT: WEIGHT_VALUE}


class Token(NamedTuple):
    """One token of a document. `hidden`: the CSA entries over it must not be trusted."""

    id: int
    weight: float
    mark: int = TEXT
    hidden: bool = False
    states: str = ""  # what the fact is about whose value this token is
    recalls: str = ""  # the same where the value is recalled


Document = list[Token]


class Writer:
    """Writes documents with a tokenizer; the public methods return one of about `n_tokens` tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> None:
        self.rng = rng
        self.vocab_size = len(tokenizer)
        self.encode: Callable[[str], list[int]] = lru_cache(maxsize=100_000)(
            lambda text: tokenizer.encode(text, add_special_tokens=False)
        )

    def write(self, kind: str, n_tokens: int) -> Document:
        """A document by the name of its kind, one that needs nothing else."""
        document: Document = getattr(self, kind)(n_tokens)
        return document

    def few_shot(self, n_tokens: int) -> Document:
        """Problems in the few-shot form, as many as fit."""
        return self._fill(n_tokens, lambda: self._completion(any_problem(self.rng, Split.STREAM)))

    def local_only(self, n_tokens: int) -> Document:
        """Problems that need nothing from outside the question."""
        return self._fill(n_tokens, lambda: self._completion(self._local()))

    def drill(self, n_tokens: int) -> Document:
        """Sums and differences, one after the other, of the sizes that local problems have."""

        def equation() -> Document:
            total, change = self.rng.randint(4, 40), self.rng.randint(2, 5)
            sign, result = self.rng.choice((("+", total + change), ("-", total - change)))
            answer = self._text(f" {result}", ANSWER_WEIGHT, ANSWER)
            return [*self._text(f" {total} {sign} {change} ="), *answer, *self._text(".")]

        return self._fill(n_tokens, equation)

    def price_quiz(self, n_tokens: int, most_facts: int, window: int) -> Document:
        """Prices, a window of filler, then a question about each price."""
        prices = priced(self.rng, self.rng.sample(GOODS, self.rng.randint(1, most_facts)))
        opening = [span for each in prices.items() for span in (stated(Fact.PRICE, *each), *self._filler(1, 1))]
        opening += self._filler(window - 6, window * 5 // 4)
        return self._quiz(opening, [asked(self.rng, Fact.PRICE, *each) for each in prices.items()], n_tokens)

    def weight_quiz(self, n_tokens: int, most_facts: int, heavy_rate: int) -> Document:
        """Weights, each with an HCA entry's length of filler behind it, then a question about each weight."""
        opening = self._filler(0, heavy_rate // 2)
        questions = []
        for metal in self.rng.sample(METALS, self.rng.randint(1, most_facts)):
            weight = self.rng.randint(2, 9)
            opening += [stated(Fact.WEIGHT, metal, weight), *self._filler(heavy_rate, heavy_rate * 5 // 4)]
            questions.append(asked(self.rng, Fact.WEIGHT, metal, weight))
        return self._quiz(opening, questions, n_tokens)

    def soup(self, n_tokens: int) -> Document:
        """Random tokens, so that every embedding and every output row sees a little training."""
        ids = [0, *(self.rng.randrange(3, self.vocab_size) for _ in range(n_tokens - 1))]
        return [Token(i, TEXT_WEIGHT / 2) for i in ids]

    def _filler(self, least: int, most: int) -> list[Span]:
        """Sentences of filler, in all at least a random number of tokens between `least` and `most`."""
        spans: list[Span] = []
        wanted = self.rng.randint(least, most)
        while wanted > 0:
            spans.append(filler_sentence(self.rng))
            wanted -= len(self.encode(spans[-1].text))
        return spans

    def _local(self) -> Problem:
        while Split.owner((made := local_problem(self.rng)).question) is not Split.STREAM:
            pass
        return made

    def _fill(self, n_tokens: int, write_one: Callable[[], Document], opening: Iterable[Token] = ()) -> Document:
        document = [*self._text(BOS, 0.0), *opening]
        while len(document) + len(part := write_one()) <= n_tokens:
            document += part
        return document

    def _quiz(self, opening: list[Span], questions: list[Problem], n_tokens: int) -> Document:
        document = self._text(BOS, 0.0) + self._spans(opening)
        self.rng.shuffle(questions)
        for question in questions:
            part = self._completion(question)
            if len(document) + len(part) <= n_tokens:
                document += part
        return document

    def _completion(self, made: Problem) -> Document:
        question = [*self._text("Question:"), *self._spans(made.spans), *self._text("\nAnswer:")]
        return [*question, *self._answer(made), *self._text("\n\n", ANSWER_WEIGHT)]

    def _answer(self, made: Problem) -> Document:
        return self._recalling(made, self._text(" " + made.answer, ANSWER_WEIGHT, ANSWER))

    def _recalling(self, made: Problem, tokens: Document) -> Document:
        """`tokens` that begin with the answer; of a `far` one the second is the value that had to be recalled."""
        if made.fact is not None:
            about = made.answer.split()[0]
            tokens[1] = tokens[1]._replace(weight=VALUE_WEIGHT, mark=VALUE_MARK[made.fact], recalls=about)
        return tokens

    def _spans(self, spans: Iterable[Span]) -> Document:
        document: Document = []
        for span in spans:
            tokens = self._text(span.text)
            if span.fact is not None:
                tokens[-2] = tokens[-2]._replace(states=span.about)  # the value stands before the full stop
            if span.fact is Fact.WEIGHT:
                tokens = [token._replace(hidden=True) for token in tokens]
            document += tokens
        return document

    def _text(self, text: str, weight: float = TEXT_WEIGHT, mark: int = TEXT) -> Document:
        return [Token(i, weight, mark) for i in self.encode(text)]


@dataclass(frozen=True)
class Batch:
    """Documents cut or padded on the right; id, weight, mark, hidden flag and source of every token, all [B, S].

    `sources`: for a recalled value the position of the latest fact that states it; -1 for every other token.
    """

    ids: Tensor
    weights: Tensor
    marks: Tensor
    hidden: Tensor
    sources: Tensor

    @classmethod
    def of(cls, documents: list[Document], n_tokens: int, pad_id: int) -> "Batch":
        pad = Token(pad_id, 0.0)
        padded = [document[:n_tokens] + [pad] * (n_tokens - len(document)) for document in documents]
        ids, weights, marks, hidden = (
            torch.tensor([[token[column] for token in document] for document in padded]) for column in range(4)
        )
        return cls(ids, weights, marks, hidden, torch.tensor([_sources(document) for document in padded]))


def _sources(document: Document) -> list[int]:
    stated_at: dict[str, int] = {}
    sources = []
    for position, token in enumerate(document):
        sources.append(stated_at[token.recalls] if token.recalls else -1)
        if token.states:
            stated_at[token.states] = position
    return sources
