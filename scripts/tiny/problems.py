"""Grade-school problems from templates, split by a hash of the question into test, shots and training."""

import random
import zlib
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from .words import ADJECTIVES, GOODS, ITEMS, METALS, NAMES, PLACES, THINGS


class Fact(Enum):
    """What a `far` problem must recall from outside the sliding window, and the cache that has to carry it."""

    PRICE = "price"  # one of several named facts: CSA's compressed entries, picked by the indexer
    WEIGHT = "weight"  # one fact more than 128 tokens back: HCA's compressed entries


class Split(Enum):
    """Which problems go where; `owner` decides by the question alone, so no two splits share one."""

    TEST = "test"
    SHOTS = "train"
    STREAM = "stream"

    @classmethod
    def owner(cls, question: str) -> "Split":
        bucket = zlib.crc32(question.encode()) % 16
        return {0: cls.TEST, 1: cls.TEST, 2: cls.SHOTS}.get(bucket, cls.STREAM)


@dataclass(frozen=True)
class Span:
    """A piece of text that starts at a token boundary; `fact` marks the sentence that states one."""

    text: str
    fact: Fact | None = None
    about: str = ""  # what the fact is about


@dataclass(frozen=True)
class Problem:
    """One problem. `spans` join to the question with a leading space; the answer has none."""

    spans: tuple[Span, ...]
    answer: str
    fact: Fact | None = None

    @property
    def question(self) -> str:
        return "".join(span.text for span in self.spans)[1:]

    @property
    def kind(self) -> Literal["local", "far"]:
        return "far" if self.fact else "local"


def filler_sentence(rng: random.Random) -> str:
    """A sentence of 6 to 9 tokens that no problem asks about; starts with a space."""
    name, other = rng.sample(NAMES, 2)
    place, thing = rng.choice(PLACES), rng.choice(THINGS)
    match rng.randrange(5):
        case 0:
            return f" {name} walks to the {place}."
        case 1:
            return f" {name} looks at the {rng.choice(ADJECTIVES)} {thing}."
        case 2:
            return f" {name} talks with {other} about the {thing}."
        case 3:
            return f" The wind blows over the {place}."
        case _:
            return f" The {rng.choice(ADJECTIVES)} {thing} sits near the {place}."


def filler(rng: random.Random, n_sentences: int) -> list[Span]:
    return [Span(filler_sentence(rng)) for _ in range(n_sentences)]


def local_problem(rng: random.Random) -> Problem:
    """One or two steps over numbers that stand in the question; sums and differences change up to 40 by up to 5."""
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    change = rng.randint(2, 5)
    ask = f" How many {items} does {name} have?"
    shape = rng.randrange(5)
    if shape < 2:
        total = rng.randint(10, 40)
        start = f" {name} has {total} {items}."
        if shape == 0:
            return _problem(f"{start} {name} finds {change} more.{ask}", f"{total} + {change} = {total + change}")
        return _problem(f"{start} {name} gives away {change}.{ask}", f"{total} - {change} = {total - change}")
    first, second = (rng.randint(2, 9), rng.randint(2, 9)) if shape == 2 else (rng.randint(2, 5), rng.randint(2, 8))
    product = first * second
    start = f" {name} has {first} bags with {second} {items} each."
    work = f"{first} * {second} = {product}"
    if shape == 2:
        return _problem(start + ask, work)
    if shape == 3 or product <= change:
        return _problem(
            f"{start} {name} finds {change} more.{ask}", f"{work}. {product} + {change} = {product + change}"
        )
    return _problem(f"{start} {name} gives away {change}.{ask}", f"{work}. {product} - {change} = {product - change}")


def _problem(question: str, work: str) -> Problem:
    return Problem((Span(question),), f"{work} #### {work.rsplit(' ', 1)[1]}")


def price_facts(rng: random.Random, goods: list[str]) -> list[tuple[str, int, Span]]:
    """(good, price, sentence) for each of `goods`."""
    prices = [rng.randint(2, 9) for _ in goods]
    return [
        (good, price, Span(f" The price: {good} {price}.", Fact.PRICE, good))
        for good, price in zip(goods, prices, strict=True)
    ]


def price_ask(rng: random.Random, good: str, price: int) -> tuple[Span, str]:
    """The sentence that asks for a price of several bags, and its worked answer."""
    n, name = rng.randint(2, 9), rng.choice(NAMES)
    answer = f"{good} {price}. {n} * {price} = {n * price} #### {n * price}"
    return Span(f" How much does {name} pay for {n} bags of {good}?"), answer


def weight_fact(rng: random.Random, metal: str) -> tuple[int, Span]:
    weight = rng.randint(2, 9)
    return weight, Span(f" The weight: {metal} {weight}.", Fact.WEIGHT, metal)


def weight_ask(rng: random.Random, metal: str, weight: int) -> tuple[Span, str]:
    """The sentence that asks for the weight of several bars, and its worked answer."""
    n = rng.randint(2, 9)
    answer = f"{metal} {weight}. {n} * {weight} = {n * weight} #### {n * weight}"
    return Span(f" How heavy are {n} bars of {metal}?"), answer


def price_problem(rng: random.Random, goods: tuple[str, ...], n_facts: int, n_filler: int) -> Problem:
    """`n_facts` named prices with a sentence between them, filler, and a question about one of them."""
    facts = price_facts(rng, rng.sample(goods, n_facts))
    good, price, _ = rng.choice(facts)
    ask, answer = price_ask(rng, good, price)
    stated = [span for *_, fact in facts for span in (fact, *filler(rng, 1))]
    return Problem((*stated, *filler(rng, n_filler), ask), answer, Fact.PRICE)


def weight_problem(rng: random.Random, metals: tuple[str, ...], n_filler: int) -> Problem:
    """One weight, filler, and the question about it."""
    metal = rng.choice(metals)
    weight, fact = weight_fact(rng, metal)
    ask, answer = weight_ask(rng, metal, weight)
    return Problem((fact, *filler(rng, n_filler), ask), answer, Fact.WEIGHT)


# Sentences of filler that push a fact out of the window (64 tokens) and into a complete HCA entry (128 tokens).
PRICE_FILLER = (8, 12)
WEIGHT_FILLER = (20, 23)
MOST_PRICES = 3


def any_problem(rng: random.Random, split: Split) -> Problem:
    """One problem of `split`, half of them `far`.

    Shots and tests name different goods and metals, so that a few-shot prompt never states two facts of one name.
    """
    goods, metals = {
        Split.TEST: (GOODS[::2], METALS[::2]),
        Split.SHOTS: (GOODS[1::2], METALS[1::2]),
        Split.STREAM: (GOODS, METALS),
    }[split]
    while True:
        match rng.randrange(4):
            case 0 | 1:
                made = local_problem(rng)
            case 2:
                made = price_problem(rng, goods, rng.randint(1, MOST_PRICES), rng.randint(*PRICE_FILLER))
            case _:
                made = weight_problem(rng, metals, rng.randint(*WEIGHT_FILLER))
        if Split.owner(made.question) is split:
            return made


def question_set(split: Split, n_problems: int, seed: int) -> list[Problem]:
    """The bundled, seeded set of a split; no question twice."""
    rng = random.Random(f"{seed}-{split.value}")
    chosen: dict[str, Problem] = {}
    while len(chosen) < n_problems:
        made = any_problem(rng, split)
        chosen.setdefault(made.question, made)
    return list(chosen.values())


def few_shot_prompt(shots: list[Problem], asked: Problem) -> str:
    """The prompt that `scripts/gsm8k.py` sends."""
    shown = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return f"{shown}Question: {asked.question}\nAnswer:"
