"""Sums, differences and products of two numbers, as a user asks for them, and as they are worked out."""

import random
from dataclasses import dataclass

from .problems import Split
from .words import OPERATOR_WORDS

LARGEST_TERM = 99
LARGEST_FACTOR = 9


@dataclass(frozen=True)
class Sum:
    """`a op b`, where `op` is "+", "-" or "*"."""

    a: int
    op: str
    b: int

    @property
    def result(self) -> int:
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.op]

    @property
    def text(self) -> str:
        return f"{self.a} {self.op} {self.b}"

    @property
    def answer(self) -> str:
        return f"{self.text} = {self.result}"

    @property
    def worked(self) -> str:
        """The same by way of the tens, where both numbers have some: `47 + 38 = 77 + 8 = 85`."""
        if not (steps := self.steps):
            return self.answer
        return f"{self.text} = {steps[1].answer}"

    @property
    def reasoning(self) -> str:
        """The way to the result as sentences: `47 + 30 = 77. 77 + 8 = 85.`"""
        return " ".join(f"{step.answer}." for step in self.steps or (self,))

    @property
    def steps(self) -> "tuple[Sum, ...]":
        """First the tens of `b`, then its ones; none where it is a product or lacks either."""
        tens, ones = self.b // 10 * 10, self.b % 10
        if self.op == "*" or not tens or not ones:
            return ()
        first = Sum(self.a, self.op, tens)
        return first, Sum(first.result, self.op, ones)


def any_sum(rng: random.Random, split: Split) -> Sum:
    """A sum of `split` that the model is to know by heart: most are additions of two numbers below 100."""
    while True:
        op = rng.choices("+-*", (0.7, 0.2, 0.1))[0]
        largest = LARGEST_FACTOR if op == "*" else LARGEST_TERM
        a, b = rng.randint(0, largest), rng.randint(0, largest)
        made = Sum(max(a, b), op, min(a, b)) if op == "-" else Sum(a, op, b)
        if Split.owner(made.text) is split:
            return made


def big_sum(rng: random.Random) -> Sum:
    """One that nobody knows by heart: numbers of up to four digits, or a product of two numbers below 100."""
    op = rng.choice("+-*")
    if op == "*":
        return Sum(rng.randint(2, 99), op, rng.randint(2, 99))
    n_digits = rng.randint(2, 4)
    a, b = (rng.randint(10 ** (n_digits - 1), 10**n_digits - 1) for _ in range(2))
    return Sum(max(a, b), op, min(a, b))


def asked_for(rng: random.Random, made: Sum) -> str:
    """A question for the result."""
    a, op, b = made.a, made.op, made.b
    tight = f"{a}{op}{b}"
    return rng.choice(
        (
            f"What is {made.text}?",
            f"What is {made.text} ?",
            f"What is {tight}?",
            f"How much is {made.text}?",
            f"Calculate {made.text}.",
            f"What is {a} {OPERATOR_WORDS[op]} {b}?",
            f"{made.text} =",
            f"{made.text} = ?",
            f"{made.text}",
            f"{tight}",
            f"Please answer: {made.text}",
        )
    )
