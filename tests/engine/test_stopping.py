from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.engine.request import FinishReason, SamplingParams, TokenLogprob, TokenOutput
from server.engine.stopping import OutputProcessor, StopStrings
from server.engine.tokenizer import Tokenizer
from tests.support.byte_bpe import write_tokenizer_dir

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_tokenizer_dir(tmp_path_factory.mktemp("bpe")))


def processor(tokenizer: Tokenizer, **sampling: Any) -> OutputProcessor:
    return OutputProcessor(tokenizer, SamplingParams(**sampling))


def char_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    by_byte = {tokenizer.token_bytes(i): i for i in range(4, 4 + 256)}
    return [by_byte[bytes([b])] for b in text.encode()]


def run(output: OutputProcessor, steps: list[list[int]]) -> tuple[str, list[int], list[TokenOutput]]:
    outputs = [made for step in steps if (made := output.feed(step)) is not None]
    return "".join(o.text for o in outputs), [i for o in outputs for i in o.token_ids], outputs


def random_steps(ids: list[int], rng: random.Random) -> list[list[int]]:
    steps, start = [], 0
    while start < len(ids):
        size = rng.randint(1, 6)
        steps.append(ids[start : start + size])
        start += size
    return steps


def test_text_is_cut_exactly_before_a_stop_string_across_tokens(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, stop=("STOP",))
    ids = char_ids(tokenizer, "an S STO STOP more")
    text, taken, outputs = run(output, [[i] for i in ids])
    assert text == "an S STO "
    assert taken == ids[: len("an S STO STOP")]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason == "STOP"
    assert output.n_generated == len(taken)
    assert output.feed([5]) is None


def test_what_may_become_a_stop_string_is_held_back_and_no_more(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, stop=("abac",))
    texts = [output.feed([i]).text for i in char_ids(tokenizer, "xababac")]  # type: ignore[union-attr]
    assert texts == ["x", "", "", "", "ab", "", ""]  # "aba" may become "abac"; after "abab" only its end may


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="abé\n", max_size=40),
    stops=st.lists(st.text(alphabet="abé\n", min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 10**6),
)
def test_steps_of_any_size_give_the_same_cut(tokenizer: Tokenizer, text: str, stops: list[str], seed: int) -> None:
    ids = tokenizer.encode(text)[1:] if seed % 2 else char_ids(tokenizer, text)
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    expected = text[: min(ends)[0] + min(ends)[1]] if ends else text
    rng = random.Random(seed)
    one_by_one = processor(tokenizer, stop=tuple(stops), max_tokens=10**6)
    grouped = processor(tokenizer, stop=tuple(stops), max_tokens=10**6)
    single_text, single_ids, single_outputs = run(one_by_one, [[i] for i in ids] + [[EOS]])
    group_text, group_ids, group_outputs = run(grouped, [*random_steps(ids, rng), [EOS]])
    assert single_text == group_text == expected
    assert single_ids == group_ids
    assert single_outputs[-1].stop_reason == group_outputs[-1].stop_reason == (min(ends)[2] if ends else None)
    assert one_by_one.n_generated == grouped.n_generated == len(single_ids)


def test_tokens_after_the_cut_inside_one_step_are_dropped(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, stop=("\n",), logprobs=0)
    ids = char_ids(tokenizer, "ab\ncd")
    made = output.feed(ids, [TokenLogprob(i, -1.0) for i in ids])
    assert made is not None
    assert (made.text, made.token_ids, len(made.logprobs)) == ("ab", tuple(ids[:3]), 3)


def test_eos_ends_without_text_and_is_counted(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer)
    text, taken, outputs = run(output, [[*char_ids(tokenizer, "hi"), EOS, *char_ids(tokenizer, "no")]])
    assert (text, len(taken)) == ("hi", 3)
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_reason is None


def test_eos_gives_out_the_beginning_of_a_stop_string(tokenizer: Tokenizer) -> None:
    text, _, _ = run(processor(tokenizer, stop=("###",)), [[*char_ids(tokenizer, "a##"), EOS]])
    assert text == "a##"


def test_ignore_eos_goes_on(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, ignore_eos=True, max_tokens=4)
    text, taken, outputs = run(output, [[i] for i in [EOS, *char_ids(tokenizer, "abcdef")]])
    assert (text, len(taken), outputs[-1].finish_reason) == ("abc", 4, FinishReason.LENGTH)


def test_stop_token_id_is_the_stop_reason(tokenizer: Tokenizer) -> None:
    a, b = char_ids(tokenizer, "ab")
    text, taken, outputs = run(processor(tokenizer, stop_token_ids=(b,)), [[a, b, a]])
    assert (text, taken, outputs[-1].stop_reason) == ("a", [a, b], b)


def test_max_tokens_cuts_inside_a_step_and_flushes(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, max_tokens=3)
    text, taken, outputs = run(output, [char_ids(tokenizer, "a日b")])
    assert text == "a\ufffd"
    assert (len(taken), outputs[-1].finish_reason) == (3, FinishReason.LENGTH)


@pytest.mark.parametrize(("last", "reason"), [(EOS, FinishReason.STOP), (None, FinishReason.STOP)])
def test_stop_at_the_last_allowed_token_has_precedence(
    tokenizer: Tokenizer, last: int | None, reason: FinishReason
) -> None:
    a, dot = char_ids(tokenizer, "a.")
    _, _, outputs = run(processor(tokenizer, max_tokens=2, stop=(".",)), [[a, dot if last is None else last]])
    assert outputs[-1].finish_reason is reason


def test_first_token_may_end_it_all(tokenizer: Tokenizer) -> None:
    for first, sampling in [(EOS, {}), (char_ids(tokenizer, "a")[0], {"max_tokens": 1}), (EOS, {"max_tokens": 1})]:
        made = processor(tokenizer, **sampling).feed([first])
        assert made is not None
        assert made.finish_reason is not None


def test_min_tokens_suppresses_eos_and_stop_strings(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, min_tokens=3, stop=("b",), stop_token_ids=(9,))
    banned = []
    for token_id in char_ids(tokenizer, "abbcb"):
        banned.append(output.banned_ids())
        output.feed([token_id])
    assert banned == [{EOS, 9}] * 3 + [frozenset()] * 2
    assert output.n_generated == 5
    assert output.stop_reason == "b"


def test_stop_string_that_begins_before_min_tokens_and_ends_after_it_counts(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, min_tokens=2, stop=("bc",))
    text, _, _ = run(output, [char_ids(tokenizer, "abcd")])
    assert text == "a"


def test_ignore_eos_with_min_tokens_bans_nothing(tokenizer: Tokenizer) -> None:
    assert processor(tokenizer, min_tokens=3, ignore_eos=True).banned_ids() == frozenset()


def test_logprobs_only_when_asked_for(tokenizer: Tokenizer) -> None:
    made = processor(tokenizer).feed([5], [TokenLogprob(5, 0.0)])
    assert made is not None
    assert made.logprobs == ()


def offsets(outputs: list[TokenOutput]) -> list[int]:
    return [one.text_offset for output in outputs for one in output.logprobs]


def run_with_logprobs(output: OutputProcessor, steps: list[list[int]]) -> tuple[str, list[TokenOutput]]:
    made = [output.feed(step, [TokenLogprob(i, -1.0) for i in step]) for step in steps]
    outputs = [one for one in made if one is not None]
    return "".join(o.text for o in outputs), outputs


def test_places_of_tokens_in_a_stop_string_are_at_the_end_of_the_text(tokenizer: Tokenizer) -> None:
    ids = char_ids(tokenizer, "abSTOP")
    text, outputs = run_with_logprobs(processor(tokenizer, stop=("STOP",), logprobs=0), [[i] for i in ids])
    assert (text, offsets(outputs)) == ("ab", [0, 1, 2, 2, 2, 2])
    text, outputs = run_with_logprobs(processor(tokenizer, stop=("STOP",), logprobs=0), [[i] for i in [*ids[:-1], EOS]])
    assert (text, offsets(outputs)) == ("abSTO", [0, 1, 2, 3, 4, 5])
    assert [len(o.logprobs) for o in outputs] == [1, 1, 1, 0, 0, 3]  # not before it is known which of the two it is


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(alphabet="abé日🦊\ufffd", max_size=30),
    broken=st.lists(st.tuples(st.integers(0, 60), st.integers(4, 399)), max_size=6),
    stops=st.lists(st.text(alphabet="abé日\ufffd", min_size=1, max_size=4), max_size=3),
    seed=st.integers(0, 10**6),
)
def test_every_token_is_placed_in_the_text_however_tokens_are_grouped(
    tokenizer: Tokenizer, text: str, broken: list[tuple[int, int]], stops: list[str], seed: int
) -> None:
    ids = char_ids(tokenizer, text)
    for where, token_id in broken:
        ids.insert(where, token_id)
    found = []
    for steps in ([[i] for i in ids] + [[EOS]], [*random_steps(ids, random.Random(seed)), [EOS]], [[*ids, EOS]]):
        whole, outputs = run_with_logprobs(processor(tokenizer, stop=tuple(stops), logprobs=0, max_tokens=999), steps)
        for i, output in enumerate(outputs):  # what is told in a stream is true of the whole
            so_far = "".join(o.text for o in outputs[: i + 1])
            assert all(one.text_offset <= len(so_far) for one in output.logprobs)
        found.append((whole, offsets(outputs), [one.token_id for o in outputs for one in o.logprobs]))
    assert found[0] == found[1] == found[2]
    whole, places, taken = found[0]
    assert places == sorted(places)
    assert taken == [*ids, EOS][: len(taken)]
    assert len(places) == sum(len(o.token_ids) for o in outputs)
    for place, token_id in zip(places, taken, strict=True):
        spelt = tokenizer.decode([token_id])
        assert spelt.startswith(("\ufffd", whole[place : place + len(spelt)]))


def test_a_long_hold_costs_no_more_for_every_token(tokenizer: Tokenizer) -> None:
    """A stop string of thousands of characters: its tokens' places are kept until the end, and looked at once."""
    n = 20_000
    (a,) = char_ids(tokenizer, "a")
    output = processor(tokenizer, stop=("a" * n + "b",), logprobs=0, max_tokens=n)
    text, outputs = run_with_logprobs(output, [[a]] * n)
    assert offsets(outputs) == list(range(n))
    assert len(text) == n


def test_long_repetitive_stop_string_is_linear() -> None:
    stops = StopStrings(["a" * 5000 + "b"])
    given_out = "".join(stops.feed("a") for _ in range(20_000))
    assert given_out == "a" * 15_000
    assert stops.feed("b") == ""
    assert stops.found == "a" * 5000 + "b"
