"""A prompt computed on from a snapshot, over shared pages, is the prompt computed as a whole: to the last bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from itertools import product

import pytest
import torch

from server.cache.layout import Placement
from server.engine.events import Cancel, Finished, Output, Prefill, PrefillFinished, Resume
from server.engine.request import FinishReason, GenerationRequest, SamplingParams
from server.engine.tokenizer import Tokenizer
from server.model.interface import LoadedModel
from server.model.numerics import NUMERICS
from tests.engine.harness import Harness, tokens_of
from tests.engine.prefixes import PAGE, Computed, Reusing, page_digests
from tests.support.checkpoints import BUNDLED
from tests.support.models import BOTH, load

BOUNDARIES = (256, 512, 768, 2048)
SUFFIXES = (0, 1, 2, 3, 4, 63, 64, 127, 128, 255, 256, 257, 700)
SNAPSHOTS = (256, 512, 768, 1792, 2048)
"""Also before the last boundary: a suffix of 0 tokens leaves none to compute, so it begins there."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WHOLE_CHUNK = 256


@dataclass(frozen=True)
class Variant:
    """What decides about a state's bits."""

    kernels: str = "cpu"
    dtype: str = "fp32"
    drafts: bool = True
    kv_dtype: str = "model"
    index_dtype: str = "auto"
    numerics: str = "plain"

    def __str__(self) -> str:
        formats = [word for word in (self.kv_dtype, self.index_dtype, self.numerics) if word not in DEFAULTS]
        return "-".join([self.kernels, self.dtype, "draft" if self.drafts else "target", *formats])

    @property
    def k(self) -> int:
        return 3 if self.drafts else 0


DEFAULTS = ("model", "auto", "plain")
VARIANTS = [Variant(*choice) for choice in product(BOTH, DTYPES, (True, False))]
FORMATS = [
    Variant(kv_dtype="fp8"),
    Variant(dtype="bf16", kv_dtype="fp8", index_dtype="mxfp4"),
    Variant(dtype="bf16", numerics="official"),
    Variant("python", "bf16", kv_dtype="fp8", index_dtype="mxfp4", numerics="official"),
]


@cache
def model_of(variant: Variant) -> LoadedModel:
    numerics = NUMERICS[variant.numerics]
    return load(BUNDLED, variant.kernels, dtype=DTYPES[variant.dtype], draft=variant.drafts, numerics=numerics)


@contextmanager
def reusing(variant: Variant, chunk_tokens: int) -> Iterator[Reusing]:
    harness = Harness(
        model_of(variant),
        Tokenizer.load(BUNDLED),
        variant.k,
        chunk_tokens=chunk_tokens,
        digest_pages=True,
        kv_dtype=variant.kv_dtype,
        index_dtype=variant.index_dtype,
    )
    yield Reusing(harness, variant.k)
    harness.engine.stop()


def tokens(n: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, 500), k=n)


BASE = tokens(BOUNDARIES[-1] + 1, seed=0)


def prompt(boundary: int, suffix: int) -> list[int]:
    """It goes on otherwise than the prompt that left the pages: also in the token behind the boundary."""
    return BASE[:boundary] + tokens(suffix, seed=1000 + suffix)


@cache
def as_a_whole(variant: Variant, cells: tuple[tuple[int, int], ...]) -> dict[tuple[int, int], Computed]:
    """Each cell without a cache."""
    found = {}
    with reusing(variant, WHOLE_CHUNK) as node:
        for cell in cells:
            command = node.command(prompt(*cell), None)
            found[cell] = node.compute(command)
            node.release(command.key)  # type: ignore[arg-type]
    return found


def differences(a: Computed, b: Computed) -> list[str]:
    """What is not the same to the last bit, by name."""
    names = [field.name for field in fields(Computed) if getattr(a, field.name) != getattr(b, field.name)]
    return [*names, *(name for name in b.live if a.live[name] != b.live[name])]


def check(variant: Variant, chunk_tokens: int, cells: tuple[tuple[int, int], ...]) -> None:
    expected = as_a_whole(variant, cells)
    with reusing(variant, chunk_tokens) as node:
        last = max(boundary for boundary, _ in cells)
        node.seed(BASE[: last + 1], [n for n in SNAPSHOTS if n <= last])
        for cell in cells:
            boundary, suffix = cell
            ids = prompt(*cell)
            hit = node.hit(ids)
            assert (hit.n if hit else 0) == max((n for n in SNAPSHOTS if n <= boundary and n < len(ids)), default=0)
            command = node.command(ids, hit)
            assert differences(node.compute(command), expected[cell]) == [], f"{boundary} + {suffix}"
            node.release(command.key)  # type: ignore[arg-type]


CELLS = tuple(product(BOUNDARIES, SUFFIXES))


def tenth(variant: Variant, chunk_tokens: int) -> tuple[tuple[int, int], ...]:
    """Another one for each variant; together they have every boundary and every suffix. What takes hundreds of steps in
    Python is left to the whole grid.
    """
    is_slow = variant.kernels == "python" and chunk_tokens < 64
    cells = [cell for cell in CELLS if not is_slow or cell[0] <= 512]
    return tuple(cells[VARIANTS.index(variant) :: 10])


@pytest.mark.parametrize("chunk_tokens", [7, 64, 256])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_prompt_computed_from_a_snapshot_is_the_whole_one(variant: Variant, chunk_tokens: int) -> None:
    check(variant, chunk_tokens, tenth(variant, chunk_tokens))


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk_tokens", [7, 64, 256])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_every_prompt_computed_from_a_snapshot_is_the_whole_one(variant: Variant, chunk_tokens: int) -> None:
    check(variant, chunk_tokens, CELLS)


@pytest.mark.parametrize("variant", FORMATS, ids=str)
def test_so_it_is_in_other_formats_and_numerics(variant: Variant) -> None:
    check(variant, 64, ((256, 1), (512, 130), (512, 0)))


@pytest.mark.parametrize("chunk_tokens", [7, 256, 600])
def test_a_snapshot_is_the_same_however_the_prompt_is_cut_and_goes_on(chunk_tokens: int) -> None:
    """Also at the end of a prompt, and after a hit: of a page more."""
    variant = Variant("python")
    with reusing(variant, WHOLE_CHUNK) as node:
        expected = node.seed(BASE[:1000], [256, 512, 768])
    with reusing(variant, chunk_tokens) as node:
        assert node.seed(BASE[:512], [256, 512]) == expected[:2]
        hit = node.hit(BASE[:768])
        command = node.command(BASE[:768], hit, at=[768])
        assert hit is not None
        assert hit.n == 512
        node.keep(command, node.events(command))
        assert list(node.cache.snapshots) == expected
        assert len(node.cache) == 768 // PAGE


@pytest.mark.parametrize("variant", [Variant(), Variant(drafts=False), Variant(dtype="bf16")], ids=str)
def test_pages_that_decoding_completes_are_those_of_the_same_tokens_as_a_prompt(variant: Variant) -> None:
    """Also where drafts were rejected across a page's end; of an answer that was given up, those until then."""
    with reusing(variant, 64) as node:
        command = node.command(BASE[:300], None, max_tokens=500)
        answer = node.compute(command)
        node.release(command.key)  # type: ignore[arg-type]
        said = [token for output in answer.outputs for token in output.token_ids]
        assert (*BASE[:300], *said)[: len(answer.tokens)] == answer.tokens
        assert len(answer.tokens) >= 799, "of the last token of an answer no state is needed"
        assert len(answer.pages) == 3
        again = node.command(answer.tokens, None)
        assert page_digests(node.events(again)) == answer.pages
        node.release(again.key)  # type: ignore[arg-type]


def test_an_answer_that_is_given_up_says_what_is_complete() -> None:
    with reusing(Variant(), 64) as node:
        command = node.command(BASE[:500], None, max_tokens=500)
        done = node.events(command)[-1]
        assert isinstance(done, PrefillFinished)
        engine = node.harness.engine
        engine.submit(Resume(command.key, command.request, command.placement, done.first, command.owner))
        said: list[int] = []
        while len(said) < 20:
            said += tokens_of(node.harness.until(Output, command.key), command.key)
        engine.submit(Cancel(command.key))
        end = node.harness.until(Finished, command.key)[-1]
        assert isinstance(end, Finished)
        known = min(len(end.tokens), 500 + len(said))
        assert known >= 500 + len(said) - 1, "all but the last token, which nothing was computed after"
        assert end.tokens[:known] == (*BASE[:500], *said)[:known]
        assert len(end.pages) == len(end.tokens) // PAGE - 1


def test_an_engine_that_was_not_asked_to_digests_no_answers(model: LoadedModel, tokenizer: Tokenizer) -> None:
    harness = Harness(model, tokenizer)
    request = GenerationRequest("x", tuple(BASE[:250]), SamplingParams(max_tokens=20, ignore_eos=True))
    where = Placement(1, (1, 2))
    harness.engine.submit(Prefill("x", request, where, 1, 1))
    done = harness.until(PrefillFinished, "x")[-1]
    assert isinstance(done, PrefillFinished)
    harness.engine.submit(Resume("x", request, where, done.first))
    assert harness.until(Finished, "x")[-1] == Finished("x", FinishReason.LENGTH)
    harness.engine.stop()
