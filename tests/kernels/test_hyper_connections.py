"""Hyper-connections against their Python modules, and their bits in any batch and on every kind of machine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from server.kernels import abi
from server.kernels.build import Isa
from server.model.layers import HeadCollapse, HyperConnection, RMSNorm
from tests.support.kernel_functions import EVERY_ISA, ROWS, Kernels, assert_rows_do_not_matter, bits

SHAPES = [(4, 256), (4, 64), (1, 33), (2, 5), (3, 40), (5, 16)]
"""(streams, hidden)."""
EPS = 1e-6


@dataclass
class Site:
    """The modules of one site, rows for them, and their kernels."""

    python: HyperConnection
    head: HeadCollapse
    norm: RMSNorm
    streams: torch.Tensor
    out: torch.Tensor

    def structure(self, kernels: Kernels, module: HyperConnection | HeadCollapse) -> abi.HyperConnection:
        iterations = module.iterations if isinstance(module, HyperConnection) else 0
        return abi.HyperConnection(
            fn=kernels.matrix(module.fn),
            base=kernels.keep(module.base),
            scale=kernels.keep(module.scale),
            norm=kernels.keep(self.norm.weight),
            streams=self.streams.shape[1],
            hidden=self.streams.shape[2],
            iterations=iterations,
            hc_eps=EPS,
            norm_eps=EPS,
        )

    def collapse(
        self, kernels: Kernels, rows: slice = slice(None), threads: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        streams = self.streams[rows].contiguous()
        r, n, d = streams.shape
        x, post, comb = torch.empty(r, d), torch.empty(r, n), torch.empty(r, n, n)
        site = self.structure(kernels, self.python)
        kernels.call("kernels_hc_collapse", site, streams, r, x, post, comb, threads)
        return x, post, comb

    def expand(
        self, kernels: Kernels, post: torch.Tensor, comb: torch.Tensor, rows: slice = slice(None), threads: int = 1
    ) -> torch.Tensor:
        streams, out = self.streams[rows].contiguous(), self.out[rows].contiguous()
        result = torch.empty_like(streams)
        site = self.structure(kernels, self.python)
        kernels.call(
            "kernels_hc_expand", site, out, streams, post[rows].contiguous(), comb[rows].contiguous(), len(streams),
            result, threads,
        )  # fmt: skip
        return result

    def collapse_head(self, kernels: Kernels, rows: slice = slice(None), threads: int = 1) -> torch.Tensor:
        streams = self.streams[rows].contiguous()
        x = torch.empty(len(streams), streams.shape[2])
        kernels.call("kernels_head_collapse", self.structure(kernels, self.head), streams, len(streams), x, threads)
        return x


def make_site(shape: tuple[int, int], iterations: int = 20) -> Site:
    n, d = shape
    torch.manual_seed(n * d)
    python, head, norm = (
        HyperConnection(n, d, iterations, EPS, EPS, 0),
        HeadCollapse(n, d, EPS, EPS, 0),
        RMSNorm(d, EPS),
    )
    for parameter in (*python.parameters(), *head.parameters(), *norm.parameters()):
        torch.nn.init.normal_(parameter, std=0.5)
    return Site(python, head, norm, torch.randn(ROWS, n, d), torch.randn(ROWS, d))


@pytest.mark.parametrize("iterations", [1, 20])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_are_near_the_python_modules(shape: tuple[int, int], iterations: int) -> None:
    site, kernels = make_site(shape, iterations), Kernels()
    x, post, comb = site.collapse(kernels)
    wanted_x, wanted_post, wanted_comb = site.python.collapse(site.streams)
    torch.testing.assert_close(x, site.norm(wanted_x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(post, wanted_post, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(comb, wanted_comb, rtol=1e-4, atol=1e-5)
    expanded = site.python.expand(site.out, site.streams, post, comb)
    torch.testing.assert_close(site.expand(kernels, post, comb), expanded, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(site.collapse_head(kernels), site.norm(site.head(site.streams)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_row_does_not_depend_on_the_batch_or_the_threads(shape: tuple[int, int]) -> None:
    site, kernels = make_site(shape), Kernels()
    _, post, comb = site.collapse(kernels)
    assert_rows_do_not_matter(lambda rows, threads: site.collapse(kernels, rows, threads)[0])
    assert_rows_do_not_matter(lambda rows, threads: site.collapse(kernels, rows, threads)[1])
    assert_rows_do_not_matter(lambda rows, threads: site.collapse(kernels, rows, threads)[2])
    assert_rows_do_not_matter(lambda rows, threads: site.expand(kernels, post, comb, rows, threads))
    assert_rows_do_not_matter(lambda rows, threads: site.collapse_head(kernels, rows, threads))


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_are_the_same_bits_on_every_machine(shape: tuple[int, int], isa: Isa) -> None:
    site, here, there = make_site(shape), Kernels(), Kernels(isa)
    ours, theirs = site.collapse(here), site.collapse(there)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(bits(mine), bits(other))
    _, post, comb = ours
    assert torch.equal(bits(site.expand(here, post, comb)), bits(site.expand(there, post, comb)))
    assert torch.equal(bits(site.collapse_head(here)), bits(site.collapse_head(there)))


def test_nan_stays_in_its_row() -> None:
    site, kernels = make_site((4, 40)), Kernels()
    clean = site.collapse(kernels)
    site.streams[1, 2, 39] = float("nan")
    for result, before in zip(site.collapse(kernels), clean, strict=True):
        assert result[1].isnan().all()
        others = [r for r in range(ROWS) if r != 1]
        assert torch.equal(result[others], before[others])
