"""Every component, lost or damaged in any way and place, fails its request by its name, and the next request works.

With one check off, another sees it or none does.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from server.cache.live import LIVE_RULES, live_positions
from server.engine.request import GenerationRequest
from server.engine.tokenizer import Tokenizer
from server.failure import RequestFailed
from server.model.interface import LoadedModel
from server.transfer.checks import PLACEMENT, Check
from tests.support.checkpoints import BUNDLED
from tests.support.models import load
from tests.support.pair import Pair, Side, a_request, running_pair, tokens

N = 263
"""A full page and a part of one, an open group of every compressor: nothing is empty."""
COMPONENTS = tuple(LIVE_RULES)
DAMAGES = ("drop", "zero", "stale", "shift", "swap")
PLACES = ("plan", "wire", "memory", "pool")
NOT_FOUND = "none"


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load(BUNDLED, draft=True)


@dataclass
class Bench:
    """A pair whose faults are in two files."""

    pair: Pair
    directory: Path
    seeds: itertools.count[int] = field(default_factory=itertools.count)

    def arm(self, prefill: str = "", decode: str = "") -> None:
        """Each file is put in place whole: the nodes read them for every room."""
        for role, text in (("prefill", prefill), ("decode", decode)):
            (self.directory / "new").write_text(text)
            (self.directory / "new").rename(self.directory / role)

    def request(self, n_tokens: int = N, **sampling: object) -> GenerationRequest:
        prompt = random.Random(next(self.seeds)).choices(range(10, 500), k=n_tokens)
        return a_request(prompt, **{"max_tokens": 2, **sampling})

    async def verdicts(self, fault: str, unchecked: str = "", n_tokens: int = N) -> list[str]:
        """Which check refuses a request under ``fault``, as ``check:component``. A swap takes two requests."""
        place = fault.partition("@")[2]
        off = f"unchecked:{unchecked}" if unchecked else ""
        self.arm(*(off, f"{fault} {off}") if place == "memory" else (f"{fault} {off}", off))
        before = self._failures()
        n = 2 if fault.startswith("swap") else 1
        answers = await asyncio.gather(
            *(self.pair.answer(self.request(n_tokens)) for _ in range(n)), return_exceptions=True
        )
        self.arm()
        named = []
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, RequestFailed):
                raise answer
            if isinstance(answer, RequestFailed):
                assert answer.failure.reason.startswith(f"{answer.component}: "), answer.failure.reason
                named.append(answer.component or "")
        found = [
            f"{check}:{component}"
            for (check, component), count in self._failures().items()
            for _ in range(int(count - before.get((check, component), 0)))
        ]
        assert sorted(verdict.partition(":")[2] for verdict in found) == sorted(named)
        return found or [NOT_FOUND]

    def _failures(self) -> dict[tuple[str, str], float]:
        checks = [*Check, PLACEMENT]
        return {
            (check, component): sum(
                node.metric("pd_check_failures_total", check=check, component=component)
                for node in (self.pair.p, self.pair.d)
            )
            for check in checks
            for component in COMPONENTS
        }


@asynccontextmanager
async def bench(model: LoadedModel, tokenizer: Tokenizer, directory: Path, **changed: Any) -> AsyncIterator[Bench]:
    base = replace(Side(draft=True, chunk_tokens=512, slots=6, pages=12), **changed)
    p = replace(base, faults=(f"@{directory / 'prefill'}",))
    d = replace(base, spec_tokens=3, permute_seed=2, faults=(f"@{directory / 'decode'}",))
    async with running_pair(model, tokenizer, p, d) as pair:
        made = Bench(pair, directory)
        await pair.answer(made.request())
        yield made
        outputs, _ = await pair.answer(made.request())
        assert outputs, "the pair serves after all of it"
        await pair.settled()


def expected_check(place: str) -> Check:
    return Check.STAMP if place == "pool" else Check.DIGEST


def test_no_component_is_empty_at_this_length(model: LoadedModel) -> None:
    assert all(len(rows) > 0 for rows in live_positions(N, model.config.sliding_window, COMPONENTS).values())


@pytest.mark.parametrize("damage", DAMAGES)
async def test_every_damaged_component_fails_its_request_by_name(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, damage: str
) -> None:
    async with bench(model, tokenizer, tmp_path) as made:
        found = {name: await made.verdicts(f"{damage}:{name}") for name in COMPONENTS}
        n = 2 if damage == "swap" else 1
        assert found == {name: [f"digest:{name}"] * n for name in COMPONENTS}


@pytest.mark.parametrize("place", PLACES[1:])
async def test_wherever_rows_are_damaged_it_is_noticed_by_name(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, place: str
) -> None:
    """A ring, a page component in the middle of its page, and the hand-off row."""
    async with bench(model, tokenizer, tmp_path) as made:
        for name in ("swa", "c4_index", "handoff"):
            for damage in DAMAGES:
                n = 2 if damage == "swap" and place != "pool" else 1
                found = await made.verdicts(f"{damage}:{name}@{place}")
                assert found == [f"{expected_check(place)}:{name}"] * n, damage


async def test_what_lay_in_the_memory_before_is_never_taken_for_a_component(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """One slot, just enough pages, and no poison: in the place of a dropped component lies an earlier request's."""
    async with bench(model, tokenizer, tmp_path, slots=1, pages=2, poison=False) as made:
        good = made.request()
        expected, _ = await made.pair.answer(good)
        for name in COMPONENTS:
            assert await made.verdicts(f"drop:{name}") == [f"digest:{name}"]
            outputs, _ = await made.pair.answer(good)
            assert tokens(outputs) == tokens(expected), f"the request after the one without {name}"
        await made.pair.settled()
        failed = made.pair.d.metric("pd_rooms_total", outcome="failed", reason="component_mismatch")
        assert failed == made.pair.p.metric("pd_rooms_total", outcome="failed", reason="rejected") == len(COMPONENTS)
        assert made.pair.d.metric("pd_fences_total") == 0, "the peer answered the abort, no fence was needed"


@pytest.mark.parametrize("n", [3, 4, 18, 63, 64, 128, 256])
async def test_at_every_border_exactly_the_components_that_are_not_empty_fail(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path, n: int
) -> None:
    live = live_positions(n, model.config.sliding_window, COMPONENTS)
    async with bench(model, tokenizer, tmp_path, poison=False) as made:
        found = {name: (await made.verdicts(f"drop:{name}", n_tokens=n))[0] for name in COMPONENTS}
    assert found == {name: f"digest:{name}" if len(rows) else NOT_FOUND for name, rows in live.items()}


async def test_only_the_room_with_the_fault_fails_among_many(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with bench(model, tokenizer, tmp_path) as made:
        requests = [made.request(20 + 40 * i) for i in range(8)]
        expected = [tokens((await made.pair.answer(request))[0]) for request in requests]
        made.arm("drop:swa:1")
        answers = await asyncio.gather(*map(made.pair.answer, requests), return_exceptions=True)
        failed = [answer for answer in answers if isinstance(answer, BaseException)]
        assert [getattr(failure, "component", failure) for failure in failed] == ["swa"]
        for found, right in zip(answers, expected, strict=True):
            assert isinstance(found, BaseException) or tokens(found[0]) == right


async def test_without_the_checks_the_same_damage_is_served(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """What the checks are worth: the decode node answers from a zeroed window, other tokens, and no error."""
    async with bench(model, tokenizer, tmp_path) as made:
        request = made.request(max_tokens=16, logprobs=0)
        right, _ = await made.pair.answer(request)
        made.arm("zero:swa", "unchecked")
        wrong, _ = await made.pair.answer(request)
        assert [o.logprobs for o in wrong] != [o.logprobs for o in right]
        assert wrong[0].token_ids == right[0].token_ids, "the first token comes with the hand-off row"
        made.arm()


WITH_ONE_CHECK_OFF = [
    ("forget:swa", "coverage", "digest:swa"),
    ("miscount:swa", "bytes", NOT_FOUND),
    ("zero:swa", "digest", NOT_FOUND),
    ("stale:handoff", "digest", "handoff:handoff"),
    ("stale:handoff", "handoff", "digest:handoff"),
    ("swap:swa@pool", "stamp", NOT_FOUND),
    ("zero:swa@pool", "stamp", "placement:swa"),
    ("shift:handoff@pool", "stamp", "handoff:handoff"),
]


async def test_with_one_check_off_another_sees_it_or_none_does(
    model: LoadedModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    async with bench(model, tokenizer, tmp_path) as made:
        assert await made.verdicts("forget:swa") == ["coverage:swa"]
        assert await made.verdicts("miscount:swa") == ["bytes:swa"]
        found = [(fault, off, (await made.verdicts(fault, off))[0]) for fault, off, _ in WITH_ONE_CHECK_OFF]
        assert found == WITH_ONE_CHECK_OFF
