"""Penalties, bans and grammars in the engine: the same answer with and without drafts, in both forms of the sampler."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from server.cache.layout import Placement
from server.engine import speculation
from server.engine.engine import Engine
from server.engine.events import Cancel, ComputeFailed, Event, Finished, Generate, Prefill, PrefillFinished
from server.engine.grammar import Grammar
from server.engine.guide import Guide
from server.engine.request import FinishReason, GenerationRequest, SamplingParams
from server.engine.tokenizer import Tokenizer
from server.kernels.sampling import Words
from server.model.interface import LoadedModel
from tests.engine.harness import Harness, outputs_of, tokens_of
from tests.support.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.support.models import load

OBJECT = Grammar(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"enum": [1, 22, 333]}},
            "required": ["name", "n"],
            "additionalProperties": False,
        }
    ),
)
EOS = 1
RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    "bias": {"logit_bias": ((20, 8.0), (21, 8.5), (22, 9.0)), "frequency_penalty": 2.0},
    "allowed": {"allowed_token_ids": tuple(range(40, 60)), "frequency_penalty": 0.3},
    "min_p": {"min_p": 0.2, "temperature": 1.0, "seed": 3},
    "grammar": {"grammar": OBJECT},
    "grammar, sampled": {"grammar": OBJECT, "temperature": 1.2, "seed": 9, "repetition_penalty": 1.1},
    "lark": {"grammar": Grammar("lark", 'start: ("ab" | "c" /[0-9]+/)+ "."'), "presence_penalty": 0.5},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path: Path = tmp_path_factory.mktemp("draft")
    write_checkpoint(path, seed=5, draft=True, vocab_size=VOCAB_SIZE)
    return load(path, draft=True)


@pytest.fixture(scope="module")
def harnesses(model: LoadedModel, tokenizer: Tokenizer) -> Iterator[dict[int, Harness]]:
    made = {k: Harness(model, tokenizer, k) for k in (0, 3)}
    yield made
    for one in made.values():
        one.engine.stop()


def requests(lengths: tuple[int, ...] = (1, 20, 130), **sampling: Any) -> list[GenerationRequest]:
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": "grammar" not in sampling, **sampling})
    return [GenerationRequest(f"r{n}", tuple(random.Random(n).choices(range(3, 520), k=n)), params) for n in lengths]


def answers(events: list[Event], batch: list[GenerationRequest]) -> list[tuple[list[int], str]]:
    assert not [event for event in events if isinstance(event, ComputeFailed)]
    return [
        (tokens_of(events, r.request_id), "".join(each.output.text for each in outputs_of(events, r.request_id)))
        for r in batch
    ]


@pytest.mark.parametrize("name", RULES)
def test_drafts_change_no_token(
    harnesses: dict[int, Harness], name: str, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    """With drafts of the layer, and with those that know the answer up to some place: many are accepted then."""
    batch = requests(**RULES[name])
    plain = answers(harnesses[0].generate(batch), batch)
    assert answers(harnesses[3].generate(batch), batch) == plain
    known = {r.prompt_ids: ids for r, (ids, _) in zip(batch, plain, strict=True)}
    by_slot = {i + 1: r for i, r in enumerate(batch)}
    rng = random.Random(0)

    def propose(runner: object, starts: list[Any], kernel: object) -> list[list[int]]:
        drafts = []
        for start in starts:
            r = by_slot[start.placement.slot]
            n_done = start.start + len(start.next_ids) - len(r.prompt_ids) + 1
            right = known[r.prompt_ids][n_done : n_done + start.n_draft]
            n_right = rng.randrange(1 + len(right))
            drafts.append([*right[:n_right], *rng.choices(range(2, 500), k=start.n_draft - n_right)])
        return drafts

    monkeypatch.setattr("server.engine.engine.propose", propose)
    events = harnesses[3].generate(batch)
    assert answers(events, batch) == plain
    assert sum(each.output.n_accepted for r in batch for each in outputs_of(events, r.request_id)) > 5


@pytest.mark.parametrize("name", RULES)
def test_both_forms_of_the_sampler_give_the_same_answer(
    harnesses: dict[int, Harness], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = requests(**RULES[name])
    with_kernel = answers(harnesses[3].generate(batch), batch)
    monkeypatch.setattr(harnesses[3].engine, "_sample_kernel", None)
    assert answers(harnesses[3].generate(batch), batch) == with_kernel


def is_new(plain: list[tuple[list[int], str]], which: int, start: int) -> bool:
    """Whether an answer's three tokens from ``start`` on are there for the first time, and no token of it twice."""
    ids = plain[which][0]
    words = [ids[i : i + 3] for i in range(start + 1)]
    return len(ids) >= start + 3 and words.index(words[-1]) == start and len(set(words[-1])) == 3


def test_rules_do_what_they_say(harnesses: dict[int, Harness], tokenizer: Tokenizer) -> None:
    def run(**sampling: Any) -> list[tuple[list[int], str]]:
        batch = requests(**sampling)
        return answers(harnesses[3].generate(batch), batch)

    plain = run()
    assert all(set(ids) <= set(range(40, 60)) for ids, _ in run(**RULES["allowed"]))
    assert all(len(set(ids)) == len(ids) for ids, _ in run(presence_penalty=2.0, frequency_penalty=2.0, max_tokens=5))
    assert run(repetition_penalty=1.4) != plain
    which, start = next(found for found in itertools.product(range(len(plain)), range(2, 9)) if is_new(plain, *found))
    before, word = plain[which][0][: start + 2], tuple(plain[which][0][start : start + 3])
    for bad in ((word,), (word[:2],), (word[:1],)):
        for ids, _ in run(bad_words=bad):
            assert all(tuple(ids[i : i + len(bad[0])]) != bad[0] for i in range(len(ids)))
    assert run(bad_words=(word,))[which][0][: start + 2] == before, "a word may be begun"
    for _, text in run(grammar=OBJECT, max_tokens=60):
        assert set(json.loads(text)) == {"name", "n"}


@pytest.mark.parametrize(("choices", "needs_end"), [(["ab", "cde"], False), (["abc", "ab"], True)])
def test_a_grammar_ends_the_answer(harnesses: dict[int, Harness], choices: list[str], needs_end: bool) -> None:
    """With ``ignore_eos`` too; where nothing can follow, without a token for the end alone."""
    batch = requests(grammar=Grammar.choice(choices), ignore_eos=True)
    for k in (0, 3):
        events = harnesses[k].generate(batch)
        for r, (ids, text) in zip(batch, answers(events, batch), strict=True):
            last = outputs_of(events, r.request_id)[-1].output
            assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)
            assert text in choices
            assert (EOS in ids) == (needs_end and text == "ab")


def test_a_stop_string_ends_an_answer_with_a_grammar(harnesses: dict[int, Harness]) -> None:
    batch = requests(grammar=OBJECT, stop=('"n"',), max_tokens=60)
    for k in (0, 3):
        events = harnesses[k].generate(batch)
        for r in batch:
            assert outputs_of(events, r.request_id)[-1].output.stop_reason == '"n"'


def test_a_request_that_forbids_every_token_fails_alone(harnesses: dict[int, Harness]) -> None:
    good = requests((20,))
    bad = GenerationRequest("bad", (5, 6), SamplingParams(grammar=OBJECT, allowed_token_ids=(300,)))
    for k in (0, 3):
        events = harnesses[k].generate([*good, bad])
        [failed] = [event for event in events if isinstance(event, ComputeFailed)]
        assert (failed.key, failed.failure.code) == ("bad", "no_token_allowed")
        assert len(tokens_of(events, "r20")) == 40


def test_what_only_a_wrong_draft_runs_into_fails_nothing(
    harnesses: dict[int, Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the drafted token nothing is allowed; but the target does not choose it."""
    [r] = requests((20,), allowed_token_ids=(40, 41), bad_words=((40, 40), (40, 41)), logit_bias=((41, 100.0),))
    plain = answers(harnesses[0].generate([r]), [r])
    monkeypatch.setattr(
        "server.engine.engine.propose", lambda runner, starts, kernel: [[40] * s.n_draft for s in starts]
    )
    assert answers(harnesses[3].generate([r]), [r]) == plain


def test_a_grammar_that_leaves_nothing_ends_the_draft_and_is_named_where_the_answer_comes_there(
    harnesses: dict[int, Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two requests with such grammars one goes another way than its draft, the other has no token to begin with."""
    batch = requests((20,), grammar=OBJECT)
    plain = answers(harnesses[3].generate(batch), batch)
    computed = Guide._compute  # noqa: SLF001

    def emptied(guide: Guide) -> Words:
        words = computed(guide)
        return np.zeros_like(words) if guide._ahead or guide._matcher.is_accepting() else words  # noqa: SLF001

    monkeypatch.setattr(Guide, "_compute", emptied)
    assert answers(harnesses[3].generate(batch), batch)[0][0][:10] == plain[0][0][:10]
    bad = GenerationRequest("bad", (5, 6), SamplingParams(grammar=Grammar("lark", 'start: "ab"?'), max_tokens=9))
    for k in (0, 3):
        [failed] = [event for event in harnesses[k].generate([bad]) if isinstance(event, ComputeFailed)]
        assert failed.failure.code == "no_token_allowed"


def test_a_draft_fits_the_grammar(harnesses: dict[int, Harness], monkeypatch: pytest.MonkeyPatch) -> None:

    proposed: list[list[int]] = []
    propose = speculation.propose

    def noted(runner: Any, starts: Any, kernel: Any) -> list[list[int]]:
        drafts = propose(runner, starts, kernel)
        proposed.extend(drafts)
        return drafts

    monkeypatch.setattr("server.engine.engine.propose", noted)
    batch = requests(allowed_token_ids=None, grammar=Grammar("regex", "[ab]{30,40}"))
    answers(harnesses[3].generate(batch), batch)
    letters = {harnesses[3].engine._tokenizer.token_text(i) for draft in proposed for i in draft}  # noqa: SLF001
    assert letters - {"<｜end▁of▁sentence｜>"}
    assert all(set(text) <= {"a", "b"} for text in letters - {"<｜end▁of▁sentence｜>"})


def test_a_prefill_node_chooses_the_first_token_by_the_rules(harnesses: dict[int, Harness]) -> None:
    """Also where nothing has compiled the grammar before: it is compiled first."""
    for sampling in ({"grammar": Grammar("regex", "z[0-9]+")}, {"allowed_token_ids": (77,)}):
        [r] = requests((20,), **sampling)
        harnesses[0].engine.submit(Prefill("p", r, Placement(1, (1,)), 1, 1))
        done = harnesses[0].until(PrefillFinished, "p")[-1]
        harnesses[0].engine.submit(Generate("g", r, Placement(2, (2,))))
        assert isinstance(done, PrefillFinished)
        assert done.first.token_id == tokens_of(harnesses[0].until(Finished, "g"), "g")[0]


def test_a_request_can_be_cancelled_while_its_grammar_is_compiled(
    harnesses: dict[int, Harness], monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer
) -> None:
    ends: list[Any] = []
    monkeypatch.setattr(tokenizer.grammars, "guide_soon", lambda grammar, on_end: ends.append(on_end))
    [r] = requests((20,), grammar=Grammar("regex", "never compiled before"))
    engine: Engine = harnesses[0].engine
    engine.submit(Generate("c", r, Placement(1, (1,))))
    engine.submit(Cancel("c"))
    assert harnesses[0].until(Finished, "c")[-1] == Finished("c", FinishReason.ABORT)
    [end] = ends
    end(RuntimeError("too late"))
    assert answers(harnesses[0].generate(requests((3,))), requests((3,)))


def test_a_grammar_that_cannot_be_compiled_fails_its_request(harnesses: dict[int, Harness]) -> None:
    [r] = requests((20,), grammar=Grammar("regex", "(never"))
    harnesses[0].engine.submit(Generate("f", r, Placement(1, (1,))))
    failed = harnesses[0].until(ComputeFailed, "f")[-1]
    assert isinstance(failed, ComputeFailed)
    assert failed.failure.code == "invalid_grammar"
