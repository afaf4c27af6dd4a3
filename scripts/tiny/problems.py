"""Grade-school problems from templates, split by a hash of the question into test, shots and training."""

import random
import zlib
from dataclasses import dataclass, replace
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


def filler_sentence(rng: random.Random) -> Span:
    """A sentence of 6 to 9 tokens that no problem asks about; starts with a space."""
    name, other = rng.sample(NAMES, 2)
    place, thing = rng.choice(PLACES), rng.choice(THINGS)
    match rng.randrange(5):
        case 0:
            text = f" {name} walks to the {place}."
        case 1:
            text = f" {name} looks at the {rng.choice(ADJECTIVES)} {thing}."
        case 2:
            text = f" {name} talks with {other} about the {thing}."
        case 3:
            text = f" The wind blows over the {place}."
        case _:
            text = f" The {rng.choice(ADJECTIVES)} {thing} sits near the {place}."
    return Span(text)


def local_problem(rng: random.Random) -> Problem:
    """One or two steps over numbers that stand in the question; sums and differences change up to 40 by up to 5."""
    name, items = rng.choice(NAMES), rng.choice(ITEMS)
    change = rng.randint(2, 5)
    ask = f" How many {items} does {name} have?"
    shape = rng.randrange(5)
    if shape < 2:
        total = rng.randint(10, 40)
        start, work = f" {name} has {total} {items}.", ""
        gains = shape == 0
    else:
        first, second = (rng.randint(2, 9), rng.randint(2, 9)) if shape == 2 else (rng.randint(2, 5), rng.randint(2, 8))
        total = first * second
        start, work = f" {name} has {first} bags with {second} {items} each.", f"{first} * {second} = {total}"
        if shape == 2:
            return Problem((Span(start + ask),), f"{work} #### {total}")
        work += ". "
        gains = shape == 3 or total <= change
    happens = f" {name} finds {change} more." if gains else f" {name} gives away {change}."
    sign, result = ("+", total + change) if gains else ("-", total - change)
    return Problem((Span(start + happens + ask),), f"{work}{total} {sign} {change} = {result} #### {result}")


def stated(fact: Fact, about: str, value: int) -> Span:
    """The sentence that states a fact."""
    return Span(f" The {fact.value}: {about} {value}.", fact, about)


def asked(rng: random.Random, fact: Fact, about: str, value: int) -> Problem:
    """The sentence that asks for several times the value of a fact, and the worked answer."""
    n = rng.randint(2, 9)
    if fact is Fact.PRICE:
        ask = f" How much does {rng.choice(NAMES)} pay for {n} bags of {about}?"
    else:
        ask = f" How heavy are {n} bars of {about}?"
    return Problem((Span(ask),), f"{about} {value}. {n} * {value} = {n * value} #### {n * value}", fact)


def priced(rng: random.Random, goods: list[str]) -> dict[str, int]:
    return {good: rng.randint(2, 9) for good in goods}


def price_problem(rng: random.Random, goods: tuple[str, ...], n_facts: int, n_filler: int) -> Problem:
    """`n_facts` named prices with a sentence between them, filler, and a question about one of them."""
    prices = priced(rng, rng.sample(goods, n_facts))
    good, price = rng.choice(list(prices.items()))
    ask = asked(rng, Fact.PRICE, good, price)
    facts = [span for each in prices.items() for span in (stated(Fact.PRICE, *each), filler_sentence(rng))]
    filler = [filler_sentence(rng) for _ in range(n_filler)]
    return replace(ask, spans=(*facts, *filler, *ask.spans))


def weight_problem(rng: random.Random, metals: tuple[str, ...], n_filler: int) -> Problem:
    """One weight, filler, and the question about it."""
    metal, weight = rng.choice(metals), rng.randint(2, 9)
    ask = asked(rng, Fact.WEIGHT, metal, weight)
    filler = [filler_sentence(rng) for _ in range(n_filler)]
    return replace(ask, spans=(stated(Fact.WEIGHT, metal, weight), *filler, *ask.spans))


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
