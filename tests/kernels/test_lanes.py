"""exp, log and softplus of the kernels: accurate, the same bits on every kind of machine, special values as in IEEE."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from server.kernels.build import Isa
from tests.support.kernel_functions import EVERY_ISA, Kernels, bits

INF, NAN = float("inf"), float("nan")
SPECIAL = torch.tensor(
    [0.0, -0.0, INF, -INF, NAN, 1, -1, 88.72, 88.73, -87.3, -87.4, -103, -104, -150, 1e-45, 1e-39, 20, 20.1, 3e38]
)
FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "kernels_exp": torch.exp,
    "kernels_log": torch.log,
    "kernels_softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}


def inputs() -> torch.Tensor:
    """Special values, then any bit pattern, then the range where e^x is finite; not a multiple of 16."""
    generator = torch.Generator().manual_seed(0)
    any_bits = torch.randint(-(2**31), 2**31, (50_003,), generator=generator, dtype=torch.int64).to(torch.int32)
    return torch.cat(
        [SPECIAL, any_bits.view(torch.float32), torch.empty(50_000).uniform_(-110, 95, generator=generator)]
    )


def compute(name: str, x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
    out = torch.empty_like(x)
    getattr(kernels.functions, name)(*(kernels.argument(a) for a in (x, len(x), out)))
    return out


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_accurate_to_two_units_in_the_last_place(name: str) -> None:
    x = inputs()
    ours, exact = compute(name, x, Kernels()), FUNCTIONS[name](x.double())
    rounded = exact.float()
    assert torch.equal(ours.isnan(), rounded.isnan())
    assert torch.equal(ours.isinf(), rounded.isinf())
    spacing = torch.nextafter(rounded.abs(), torch.tensor(INF)) - rounded.abs()
    finite = rounded.isfinite()
    assert ((ours.double() - exact).abs() / spacing)[finite].max() < 2


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_the_same_bits_on_every_machine(name: str, isa: Isa) -> None:
    x = inputs()
    assert torch.equal(bits(compute(name, x, Kernels(isa))), bits(compute(name, x, Kernels())))


@pytest.mark.parametrize("isa", EVERY_ISA)
def test_bf16_is_rounded_as_torch_does(isa: Isa) -> None:
    x, kernels = inputs(), Kernels(isa)
    out = torch.empty(len(x), dtype=torch.bfloat16)
    kernels.functions.kernels_to_bf16(*(kernels.argument(a) for a in (x, len(x), out)))
    assert torch.equal(bits(out.float()), bits(x.bfloat16().float()))
