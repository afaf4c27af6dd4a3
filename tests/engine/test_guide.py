"""An answer's place in its grammar: going ahead with drafts and back again leaves no trace."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from llguidance.gbnf_to_lark import is_lark_syntax

from server.engine.grammar import _LARK, MAX_EBNF_CHARS, MAX_GRAMMAR_CHARS, Grammar
from server.engine.grammar_compiler import MAX_KEPT, GrammarCompiler
from server.engine.guide import GrammarFailed, Guide
from server.engine.tokenizer import Tokenizer
from server.failure import RequestFailed
from server.kernels.sampling import Words

SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {"type": "string", "maxLength": 5},
        "c": {"enum": ["x", "yy", 3]},
    },
    "required": ["a"],
    "additionalProperties": {"type": "boolean"},
}
OBJECT = Grammar("json_schema", json.dumps(SCHEMA))
EOS = 1


def guide_of(tokenizer: Tokenizer, grammar: Grammar) -> Guide:
    tokenizer.grammars.compile(grammar)
    guide = tokenizer.grammars.guide(grammar)
    assert guide is not None
    return guide


def tokens_in(mask: Words) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def may_follow(tokenizer: Tokenizer, grammar: Grammar, text: str) -> list[str]:
    guide = guide_of(tokenizer, grammar)
    guide.take(tokenizer.encode_rendered(text))
    return [tokenizer.token_text(token) for token in tokens_in(guide.mask())]


def test_drafts_leave_no_trace(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    for _ in range(30):
        guide, answer = guide_of(tokenizer, OBJECT), list[int]()
        for _ in range(25):
            draft: list[int] = []
            guide.forget()
            for _ in range(rng.randrange(5)):  # as the draft layer proposes
                draft.append(rng.choice(tokens_in(guide.mask())))
                if not guide.look_ahead(draft[-1]):
                    break
            masks = guide.masks(draft)
            n_kept = rng.randrange(1 + len(draft))
            after = guide_of(tokenizer, OBJECT)
            after.take(answer)
            for j, mask in enumerate(masks[: n_kept + 1]):
                assert tokens_in(mask) == tokens_in(after.mask())
                if j < n_kept and after.take([draft[j]]):
                    break
            answer += draft[:n_kept]
            if guide.take(draft[:n_kept]):
                break


def test_masks_of_a_draft_that_the_grammar_forbids_are_those_before_it(tokenizer: Tokenizer) -> None:
    guide = guide_of(tokenizer, OBJECT)
    [brace, quote, wrong] = [tokenizer.encode_rendered(text)[0] for text in ("{", '"', "}")]
    masks = guide.masks([brace, quote, wrong, brace])
    assert len(masks) == 5
    assert brace in tokens_in(masks[0])
    assert {tokenizer.token_text(token)[0] for token in tokens_in(masks[0])} == {"{"}
    assert quote in tokens_in(masks[1])
    assert masks[2].tolist() == masks[3].tolist() == masks[4].tolist()
    assert tokens_in(guide.masks([])[0]) == tokens_in(masks[0])


def test_the_answer_may_end_where_the_grammar_does_and_nowhere_else(tokenizer: Tokenizer) -> None:
    number = Grammar("regex", "[0-9]{1,3}")
    end = tokenizer.token_text(EOS)
    assert end not in may_follow(tokenizer, number, "")
    assert end in may_follow(tokenizer, number, "4")
    assert may_follow(tokenizer, number, "444") == [end]
    guide = guide_of(tokenizer, number)
    assert not guide.take(tokenizer.encode_rendered("44"))
    assert guide.take([EOS])
    assert guide_of(tokenizer, Grammar("regex", "ab?")).take(tokenizer.encode_rendered("ab"))


def test_a_token_against_the_grammar_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarFailed, match="does not fit"):
        guide_of(tokenizer, OBJECT).take(tokenizer.encode_rendered("x"))


def test_json_has_little_white_space(tokenizer: Tokenizer) -> None:
    """A model that does not know how to go on cannot write white space without end."""
    for text in ("{ ", "{\n" + 16 * " "):
        assert not {" ", "\n"} & set(may_follow(tokenizer, OBJECT, text))


def test_choices_are_taken_as_they_are(tokenizer: Tokenizer) -> None:
    grammar = Grammar.choice(['say "a"\n', "über\\", "42"])
    for text in ('say "a"\n', "über\\", "42"):
        assert guide_of(tokenizer, grammar).take(tokenizer.encode_rendered(text))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar("regex", "(a"), "unclosed group"),
        (Grammar("lark", "start: {{{"), "Expected value"),
        (Grammar("lark", "start: missing"), "missing"),
        (Grammar("json_schema", "{"), "JSON|EOF|expected"),
        (Grammar("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}'), "minLength"),
        (Grammar("json_schema", '{"$ref": "#/$defs/none"}'), "does not exist"),
        (Grammar("json_schema", '{"not": {"type": "string"}}'), "not"),
        (Grammar("regex", "a" * (MAX_GRAMMAR_CHARS + 1)), "at most"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_with_a_grammar_is_said(tokenizer: Tokenizer, grammar: Grammar, reason: str) -> None:
    with pytest.raises(RequestFailed, match=reason) as failure:
        tokenizer.grammars.compile(grammar)
    assert failure.value.code == "invalid_grammar"
    assert tokenizer.grammars.guide(grammar) is None


def test_a_grammar_whose_steps_cost_too_much_fails_by_itself(tokenizer: Tokenizer) -> None:
    """However it is written: here 3**30 letters in one rule."""
    rules = "".join(f"a{i}: a{i + 1} a{i + 1} a{i + 1}\n" for i in range(30))
    guide = guide_of(tokenizer, Grammar("lark", f'start: a0\n{rules}a30: "x" | ""'))
    with pytest.raises(GrammarFailed, match="items"):  # noqa: PT012
        for _ in range(100):
            guide.take(tokenizer.encode_rendered("x"))
            guide.mask()


def test_gbnf_is_converted(tokenizer: Tokenizer) -> None:
    assert guide_of(tokenizer, Grammar.ebnf('root ::= "a" [0-9]')).take(tokenizer.encode_rendered("a7"))
    with pytest.raises(ValueError, match="not a grammar"):
        Grammar.ebnf('root ::= "a" ]')
    with pytest.raises(ValueError, match="at most"):
        Grammar.ebnf("a" * (MAX_EBNF_CHARS + 1))


def test_only_the_grammars_of_late_are_kept(tokenizer: Tokenizer) -> None:
    grammars = [Grammar("regex", f"a{i}") for i in range(MAX_KEPT + 1)]
    for grammar in grammars:
        tokenizer.grammars.compile(grammar)
    assert tokenizer.grammars.guide(grammars[0]) is None
    assert tokenizer.grammars.guide(grammars[1]) is not None


def test_a_guide_is_made_in_another_thread(tokenizer: Tokenizer) -> None:
    for grammar, is_good in ((Grammar("regex", "b+"), True), (Grammar("regex", "(b"), False)):
        done: Future[tuple[Guide | Exception, str]] = Future()
        tokenizer.grammars.guide_soon(grammar, lambda guide: done.set_result((guide, threading.current_thread().name)))  # noqa: B023
        guide, thread = done.result(timeout=60)
        assert isinstance(guide, Guide if is_good else RequestFailed)
        assert thread.startswith("compile grammar")


def test_a_tokenizer_that_the_library_does_not_know_is_refused() -> None:
    for settings, ends in (('{"nothing": 1}', frozenset({1})), ("", frozenset[int]())):
        with pytest.raises(RequestFailed, match="not supported") as failure:
            GrammarCompiler(settings, ends).compile(Grammar("regex", "a"))
        assert failure.value.code == "unsupported"


def test_lark_is_told_from_gbnf_as_the_library_does() -> None:
    parts = ["start", ":", " ", "\n", "\t", "\r", "%llguidance", "root ::= ", "x", "\n\n"]
    rng = random.Random(3)
    texts = ["".join(rng.choices(parts, k=rng.randrange(8))) for _ in range(3000)]
    found = [_LARK.search(text) is not None for text in texts]
    assert found == [is_lark_syntax(text) for text in texts]
    assert 100 < sum(found) < 2900


def test_empty_lines_cost_as_much_as_other_text() -> None:
    def cost(n: int) -> float:
        text, found = 'root ::= "a"' + "\n" * n, []
        for _ in range(3):
            began = time.thread_time()
            Grammar.ebnf(text)
            found.append(time.thread_time() - began)
        return min(found)

    assert cost(MAX_EBNF_CHARS - 12) < 60 * cost(MAX_EBNF_CHARS // 16)  # 256 times, if it were the square


def test_the_processor_time_of_a_grammar_is_limited(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow or fast this machine is: the clock is the test's. Two answers at once have what one has."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 0.004  # what every call of the library takes
        return now

    monkeypatch.setattr("server.engine.guide.time.thread_time", clock)
    grammar = Grammar("regex", "a*")
    guides = [guide_of(tokenizer, grammar) for _ in range(2)]
    [a] = tokenizer.encode("a")[1:]
    n_tokens = 0

    def go_on(n_times: int) -> None:
        nonlocal n_tokens
        for guide in n_times * guides:
            guide.mask()
            guide.take([a])
            n_tokens += 1

    monkeypatch.setattr("server.engine.guide.CPU_S_PER_TOKEN", 0.009)  # a mask and a token take less
    go_on(200)
    n_tokens = 0
    monkeypatch.setattr("server.engine.guide.CPU_S_PER_TOKEN", 0.003)
    with pytest.raises(GrammarFailed, match="too ambiguous"):
        go_on(200)
    assert 45 <= n_tokens <= 55  # 0.25 s, of which each takes 5 ms
    for guide in guides:
        with pytest.raises(GrammarFailed, match="too ambiguous"):
            guide.take([a])
    guide_of(tokenizer, grammar).take([a])
