"""Training documents in the official chat format: problems, sums and talk, with and without thinking and tools."""

import json
import string
from collections.abc import Callable
from dataclasses import dataclass, replace

from . import chat_format as official
from .documents import ANSWER, ANSWER_WEIGHT, Document, Token, Writer
from .json_replies import any_schema, short_value
from .problems import Problem, Split, any_problem
from .sums import Sum, any_sum, asked_for, big_sum
from .tools import CALCULATOR, calculator, other_tool

# Marks of the chat, beside those of the documents.
SUM, CALL, RESULT, TALK = range(4, 8)
SUM_WEIGHT, CALL_WEIGHT, OPENING_WEIGHT = 0.5, 0.3, 0.02

TALK_PAIRS = (
    (("Hello", "Hello!", "Hi", "Hi!", "hello"), "Hello! Ask me about sums, prices and weights."),
    (("Who are you?", "What are you?"), "I am a small model. I answer questions about numbers."),
    (
        ("What can you do?", "What do you know?", "Can you help me?"),
        "I know sums, prices and weights. Ask me about numbers.",
    ),
    (("Thanks", "Thanks!", "thanks"), "You are welcome."),
)
UNKNOWN = "I do not know that. I only answer questions about numbers."
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a small model.",
    "Answer questions about numbers.",
    "You can use a calculator.",
    "Use the calculator.",
)


@dataclass(frozen=True)
class Turn:
    """A user's question and the assistant's answer, as documents without their tags."""

    question: Document
    content: Document  # where no reasoning stands before it
    reasoning: Document
    conclusion: Document  # the content behind the reasoning


class ConversationWriter(Writer):
    """Writes also documents in the chat format, each for chat or for thinking mode."""

    def chat(self, n_tokens: int) -> Document:
        """Problems."""
        return self._conversation(n_tokens, lambda: self._problem_turn(any_problem(self.rng, Split.STREAM)))

    def sum_chat(self, n_tokens: int) -> Document:
        """Sums, some local problems and some talk, so that all of them stand beside each other."""

        def turn() -> Turn:
            chance = self.rng.random()
            if chance < 0.8:
                return self._sum_turn(any_sum(self.rng, Split.STREAM))
            return self._problem_turn(self._local()) if chance < 0.9 else self._talk_turn()

        return self._conversation(n_tokens, turn)

    def talk(self, n_tokens: int) -> Document:
        """Small talk, and questions that have no answer here."""
        return self._conversation(n_tokens, self._talk_turn)

    def sum_drill(self, n_tokens: int) -> Document:
        """Sums and the steps of sums, one after the other."""

        def equation() -> Document:
            made = any_sum(self.rng, Split.STREAM)
            if self.rng.random() < 0.5 and made.steps:
                made = self.rng.choice(made.steps)
            work = made.worked.removeprefix(f"{made.text} =")
            return [*self._text(f" {made.text} ="), *self._text(work, SUM_WEIGHT, SUM), *self._text(".")]

        return self._fill(n_tokens, equation)

    def tools(self, n_tokens: int) -> Document:
        """Tools are offered: the calculator is called where it is among them, and its result is the answer."""
        rng = self.rng
        thinks, offered = rng.random() < 0.4, rng.random() < 0.8
        schemas = [calculator(rng)] if offered else []
        if not offered or rng.random() < 0.15:
            schemas.append(other_tool(rng))
        rng.shuffle(schemas)
        opening = self._opening(thinks, official.tools_block(schemas))

        def part() -> Document:
            chance = rng.random()
            if chance < 0.07:
                return self._turn(self._talk_turn(), thinks, keeps=True)
            if not offered:
                return self._turn(self._sum_turn(any_sum(rng, Split.STREAM)), thinks, keeps=True)
            if chance < 0.2:
                made = self._local()
                return self._tool_loop(self._question(made), _steps(made), thinks)
            made_sum = big_sum(rng) if chance < 0.4 else any_sum(rng, Split.STREAM)
            return self._tool_loop(self._text(asked_for(rng, made_sum)), [made_sum], thinks)

        return self._fill(n_tokens, part, opening)

    def json_reply(self, n_tokens: int) -> Document:
        """Replies in JSON: to the schema in the system message, or without any schema."""
        rng = self.rng
        thinks, schema = rng.random() < 0.3, any_schema(rng)
        opening = self._opening(thinks, official.schema_block(schema) if rng.random() < 0.8 else official.JSON_ONLY)

        def part() -> Document:
            reply = self._text(json.dumps(short_value(rng, schema), ensure_ascii=False), CALL_WEIGHT, CALL)
            asked = rng.choice(("json", "Give me json.", "Please answer in JSON.", self._nonsense()))
            thought = self._text("I answer in json.", CALL_WEIGHT)
            return self._turn(Turn(self._text(asked), reply, thought, reply), thinks, keeps=True)

        return self._fill(n_tokens, part, opening)

    def _conversation(self, n_tokens: int, turn: Callable[[], Turn]) -> Document:
        """Turns in one mode. Reasoning of earlier turns is mostly left out, as the official encoding does."""
        thinks = self.rng.random() < 0.4
        keeps_all = not thinks or self.rng.random() < 0.6

        def part() -> Document:
            return self._turn(turn(), thinks, keeps_all or self.rng.random() < 0.5)

        return self._fill(n_tokens, part, self._opening(thinks))

    def _opening(self, thinks: bool, tools: str = "") -> Document:
        effort = official.EFFORT if thinks and self.rng.random() < 0.4 else ""
        system = self.rng.choice(SYSTEM_PROMPTS) if self.rng.random() < 0.2 else ""
        return self._text(effort + system + tools, OPENING_WEIGHT)

    def _turn(self, turn: Turn, thinks: bool, keeps: bool) -> Document:
        asked = [*self._text(official.USER), *turn.question, *self._text(official.ASSISTANT)]
        if not thinks or not keeps:
            return [*asked, *self._text(official.END_THINK), *turn.content, *self._end()]
        thought = [*self._text(official.THINK), *turn.reasoning, *self._text(official.END_THINK, ANSWER_WEIGHT)]
        return [*asked, *thought, *turn.conclusion, *self._end()]

    def _tool_loop(self, question: Document, steps: list[Sum], thinks: bool) -> Document:
        """A question, a call and a result for each step, and the answer, which trusts the results even where wrong."""
        document = [*self._text(official.USER), *question]
        said: int | None = None
        for step in steps:
            made = step if said is None else replace(step, a=said)  # a later step goes on from the result before it
            said = self.rng.randint(0, 199) if self.rng.random() < 0.3 else made.result
            document += self._thought(f"{made.text}: I use the calculator.", thinks)
            call = official.call_text(CALCULATOR, {"a": made.a, "op": made.op, "b": made.b})
            document += [*self._text(call, CALL_WEIGHT, CALL), *self._end()]
            shown = str(said) if self.rng.random() < 0.85 else f'{{"result": {said}}}'
            document += self._text(official.USER + official.result_text(shown))
        document += self._thought(f"The result is {said}.", thinks)
        return [*document, *self._text(f"The answer is {said}.", ANSWER_WEIGHT, RESULT), *self._end()]

    def _thought(self, reasoning: str, thinks: bool) -> Document:
        """From the assistant's tag to the end of its reasoning."""
        if not thinks:
            return self._text(official.ASSISTANT + official.END_THINK)
        start = self._text(official.ASSISTANT + official.THINK)
        return [*start, *self._text(reasoning, CALL_WEIGHT), *self._text(official.END_THINK, ANSWER_WEIGHT)]

    def _problem_turn(self, made: Problem) -> Turn:
        content = self._recalling(made, self._text(made.answer, ANSWER_WEIGHT, ANSWER))
        reasoning = self._recalling(made, self._text(made.answer.partition(" ####")[0] + ".", ANSWER_WEIGHT, ANSWER))
        return Turn(self._question(made), content, reasoning, [_in_sight(token) for token in content])

    def _sum_turn(self, made: Sum) -> Turn:
        question = self._text(asked_for(self.rng, made))
        return Turn(
            question, *(self._text(text, SUM_WEIGHT, SUM) for text in (made.worked, made.reasoning, made.answer))
        )

    def _talk_turn(self) -> Turn:
        rng = self.rng
        questions, answer = rng.choice(TALK_PAIRS) if rng.random() < 0.5 else ((self._nonsense(),), UNKNOWN)
        content = self._text(answer, CALL_WEIGHT, TALK)
        thought = self._text("I know what to answer.", CALL_WEIGHT)
        return Turn(self._text(rng.choice(questions)), content, thought, content)

    def _nonsense(self) -> str:
        """A question of mostly unknown words."""
        words = ["".join(self.rng.choices(string.ascii_lowercase, k=self.rng.randint(2, 8))) for _ in range(4)]
        start = self.rng.choice(("What is", "Who is", "How many", "Please", "What", "Tell me", "Write", "Can you"))
        return " ".join([start, *words[: self.rng.randint(1, 4)]]) + self.rng.choice("?.")

    def _question(self, made: Problem) -> Document:
        first, *rest = made.spans
        return self._spans([replace(first, text=first.text[1:]), *rest])

    def _end(self) -> Document:
        return self._text(official.EOS, ANSWER_WEIGHT)


def _in_sight(token: Token) -> Token:
    """A token of an answer whose recalled value was already found by the reasoning before it."""
    return token._replace(recalls="", mark=ANSWER) if token.recalls else token


def _steps(made: Problem) -> list[Sum]:
    """The steps of a local problem's worked answer: `3 * 4 = 12. 12 + 5 = 17 #### 17`."""
    work = made.answer.partition(" ####")[0]
    terms = [equation.split() for equation in work.split(". ")]
    return [Sum(int(a), op, int(b)) for a, op, b, *_ in terms]
