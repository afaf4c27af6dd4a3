"""What a checkpoint can do, each as a share of right answers: greedy, through the real engine, in this process."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.local_engine import LocalEngine
from evaluation.questions import STOP, bundled_questions, marked_number
from rich.table import Table

from server.engine.request import SamplingParams

from .chat_format import ASSISTANT, BOS, END_THINK, EOS, THINK, USER, call_text, result_text, tools_block
from .problems import Split
from .sums import LARGEST_TERM, Sum, any_sum, asked_for
from .tools import CALCULATOR, calculator, other_tool

MOST_NEW_TOKENS = 96
N_AT_ONCE = 8
FIRST_SUM = Sum(3, "+", 4)
NUMERICS: dict[str, tuple[str, ...]] = {"plain": (), "official": ("--numerics", "official", "--kv-dtype", "fp8")}
"""The options of the engine: the formulas, and the reference's roundings with rows stored as they were rounded."""


@dataclass(frozen=True)
class Case:
    """A prompt, and the answer that is right: the whole text, or what a `####` must name."""

    score: str
    prompt: str
    right: str
    stop: tuple[str, ...] = ()
    thinks: bool = False

    def is_right(self, answer: str) -> bool:
        """In thinking mode some reasoning has to come first, and it has to end."""
        if self.thinks:
            reasoning, tag, answer = answer.partition(END_THINK)
            if not tag or not reasoning.strip():
                return False
        if self.right.startswith("####"):
            return marked_number(answer) == marked_number(self.right)
        return answer.strip() == self.right.strip()


@dataclass(frozen=True)
class Score:
    name: str
    numerics: str
    n_cases: int
    n_right: int
    first_wrong: tuple[str, str] | None  # prompt and answer

    @property
    def share(self) -> float:
        return self.n_right / self.n_cases


def all_cases(n_questions: int, n_sums: int, seed: int) -> list[Case]:
    """Cases of every score. The sums are of a split that no training document asks for."""
    return [*_question_cases(n_questions), *_sum_cases(n_sums, seed), *_tool_cases(n_sums, seed)]


def score(checkpoint: Path, cases: Sequence[Case], threads: int, numerics: str) -> list[Score]:
    """Asks all cases in one of `NUMERICS`. Raises `BenchFailed` if the engine fails."""
    engine = LocalEngine(checkpoint, threads=threads, more=NUMERICS[numerics])
    answers: list[list[int]] = [[] for _ in cases]
    try:
        for sampling, numbers in _alike(cases).items():
            prompts = [tuple(engine.tokenizer.encode(cases[number].prompt)) for number in numbers]
            for _, key, output in engine.generate(prompts, sampling, N_AT_ONCE):
                answers[numbers[key]].extend(output.token_ids)
        texts = [engine.tokenizer.decode(ids) for ids in answers]
    finally:
        engine.close()
    return list(_scores(zip(cases, texts, strict=True), numerics))


def rendered(scores: Sequence[Score]) -> Table:
    table = Table("score", "numerics", "right", "of", "share", title="greedy answers")
    for each in scores:
        table.add_row(each.name, each.numerics, str(each.n_right), str(each.n_cases), f"{each.share:.3f}")
    return table


def _alike(cases: Sequence[Case]) -> dict[SamplingParams, list[int]]:
    """The numbers of the cases that are asked in the same way."""
    groups: dict[SamplingParams, list[int]] = {}
    for number, case in enumerate(cases):
        sampling = SamplingParams(max_tokens=MOST_NEW_TOKENS, stop=case.stop)
        groups.setdefault(sampling, []).append(number)
    return groups


def _scores(answered: Iterable[tuple[Case, str]], numerics: str) -> Iterator[Score]:
    by_name: dict[str, list[tuple[Case, str]]] = {}
    for case, text in answered:
        answer = next((text.partition(stop)[0] for stop in case.stop if stop in text), text)
        by_name.setdefault(case.score, []).append((case, answer))
    for name, rows in by_name.items():
        wrong = [(case.prompt, text) for case, text in rows if not case.is_right(text)]
        yield Score(name, numerics, len(rows), len(rows) - len(wrong), wrong[0] if wrong else None)


def _question_cases(n_questions: int) -> Iterator[Case]:
    """(a) the bundled questions: few-shot completion, chat, and chat with thinking."""
    for problem, prompt in bundled_questions()[:n_questions]:
        right = f"#### {problem.gold}"
        yield Case(f"completion, {problem.kind}", prompt, right, STOP)
        for thinks in (False, True):
            name = f"{'thinking' if thinks else 'chat'}, {problem.kind}"
            yield Case(name, _asked(problem.question, thinks), right, thinks=thinks)


def _sum_cases(n_sums: int, seed: int) -> Iterator[Case]:
    """(b) and (c): sums of two numbers below 100, in chat and with thinking."""
    rng = random.Random(f"sums-{seed}")
    for made in _test_sums(rng, n_sums):
        question = "What is 3 + 4 ?" if made == FIRST_SUM else asked_for(rng, made)
        yield Case("sums", _asked(question, False), made.worked)
        yield Case("sums, thinking", _asked(question, True), made.answer, thinks=True)


def _tool_cases(n_sums: int, seed: int) -> Iterator[Case]:
    """(d): the calculator is called, its result (a wrong one) is the answer, and without it the sum is worked out.

    With which operator it is called shows where the question is not about a sum.
    """
    rng = random.Random(f"tools-{seed}")
    for made in _test_sums(rng, n_sums):
        question, offered, said = asked_for(rng, made), tools_block([calculator(rng)]), rng.randint(0, 199)
        call = call_text(CALCULATOR, {"a": made.a, "op": made.op, "b": made.b})
        for thinks in (False, True):
            mode = "tool, thinking" if thinks else "tool"
            prompt = _asked(question, thinks, offered)
            thought = f"{made.text}: I use the calculator.{END_THINK}" if thinks else ""
            told = f"{prompt}{thought}{call}{EOS}{_asked(result_text(str(said)), thinks, bos='')}"
            yield Case(f"{mode}: called", prompt, call, thinks=thinks)
            yield Case(f"{mode}: answered", told, f"The answer is {said}.", thinks=thinks)
        yield Case("another tool: not called", _asked(question, False, tools_block([other_tool(rng)])), made.worked)
    for made in _other_sums(rng, n_sums):
        name = "difference" if made.op == "-" else "product"
        call = call_text(CALCULATOR, {"a": made.a, "op": made.op, "b": made.b})
        yield Case(f"tool, {name}: called", _asked(asked_for(rng, made), False, tools_block([calculator(rng)])), call)


def _test_sums(rng: random.Random, n_sums: int) -> Iterator[Sum]:
    yield FIRST_SUM
    chosen = {FIRST_SUM}
    while len(chosen) < n_sums:
        made = Sum(rng.randint(0, LARGEST_TERM), "+", rng.randint(0, LARGEST_TERM))
        if Split.owner(made.text) is Split.TEST and made not in chosen:
            chosen.add(made)
            yield made


def _other_sums(rng: random.Random, n_sums: int) -> Iterator[Sum]:
    """Differences and products by turns; there are not many products, so they come again."""
    for number in range(n_sums):
        op = "-*"[number % 2]
        while (made := any_sum(rng, Split.TEST)).op != op:
            pass
        yield made


def _asked(question: str, thinks: bool, system: str = "", bos: str = BOS) -> str:
    return f"{bos}{system}{USER}{question}{ASSISTANT}{THINK if thinks else END_THINK}"
