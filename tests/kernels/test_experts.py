"""Mixture of experts against its Python module; its order of addition; bits in any batch and on every machine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from server.kernels import abi
from server.kernels.build import Isa
from server.model.config import ModelConfig, load_config
from server.model.moe import MoE
from server.model.numerics import OFFICIAL, use_numerics
from tests.support.checkpoints import BUNDLED
from tests.support.kernel_functions import EVERY_ISA, ROWS, Kernels, assert_rows_do_not_matter, bits

VOCAB = 50
CASES: dict[str, dict[str, Any]] = {
    "sixteen": {"n_routed_experts": 16, "num_experts_per_tok": 4, "hidden_size": 64, "moe_intermediate_size": 48},
    "by token": {
        "n_routed_experts": 11, "num_experts_per_tok": 3, "hidden_size": 40, "moe_intermediate_size": 21,
        "num_hash_layers": 1,
    },
    "odd": {"n_routed_experts": 5, "num_experts_per_tok": 2, "hidden_size": 33, "moe_intermediate_size": 13},
    "no limit": {
        "n_routed_experts": 29, "num_experts_per_tok": 6, "hidden_size": 17, "moe_intermediate_size": 3,
        "swiglu_limit": 0.0,
    },
    "one": {"n_routed_experts": 1, "num_experts_per_tok": 1, "hidden_size": 130, "moe_intermediate_size": 150},
}  # fmt: skip


QUANTIZED = {"none": (False, False), "routed": (True, False), "shared": (False, True), "all": (True, True)}
"""Whether official numerics round what the routed experts and the shared one multiply."""


class Layer:
    """A random layer, rows for it, and its two forms."""

    def __init__(self, case: str, dtype: torch.dtype = torch.float32, quantized: str = "none") -> None:
        small = {"num_hash_layers": 0, "vocab_size": VOCAB, "swiglu_limit": 0.5, "routed_scaling_factor": 1.5}
        self.config: ModelConfig = dataclasses.replace(load_config(BUNDLED), **{**small, **CASES[case]})
        generator = torch.Generator().manual_seed(1)
        self.python = MoE(self.config, 0, 0, torch.float32)
        for name, parameter in self.python.named_parameters():
            if name == "gate.tid2eid":
                picks = [torch.randperm(self.config.n_routed_experts, generator=generator) for _ in range(VOCAB)]
                parameter.data = torch.stack(picks)[:, : self.config.num_experts_per_tok].contiguous()
            else:
                values = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.data = values.to(dtype).float() if "experts" in name else values
        routed, shared = QUANTIZED[quantized]
        self.rounds = [routed] * self.config.n_routed_experts + [shared]
        for expert, rounds in zip((*self.python.experts, self.python.shared_experts), self.rounds, strict=True):
            for linear in (expert.w1, expert.w2, expert.w3):
                linear.quantized = "fp8" if rounds else ""
        use_numerics(self.python, OFFICIAL)
        self.dtype = dtype
        self.x = torch.randn(ROWS, self.config.hidden_size, generator=generator)
        self.tokens = torch.randint(VOCAB, (ROWS,), generator=generator)

    def structure(self, kernels: Kernels) -> abi.Experts:
        config, gate = self.config, self.python.gate
        every: list[Any] = [*self.python.experts, self.python.shared_experts]
        up = kernels.matrices([torch.cat([e.w1.weight, e.w3.weight]).to(self.dtype) for e in every])
        down = kernels.matrices([e.w2.weight.to(self.dtype) for e in every])
        for matrices in (up, down):
            for matrix, rounds in zip(matrices, self.rounds, strict=True):
                matrix.quantized_input = rounds
        return abi.Experts(
            gate=kernels.matrix(gate.weight),
            up=up,
            down=down,
            bias=None if gate.is_hash else kernels.keep(gate.bias),
            by_token=kernels.keep(gate.tid2eid) if gate.is_hash else None,
            experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            inner=config.moe_intermediate_size,
            hidden=config.hidden_size,
            scale=config.routed_scaling_factor,
            limit=config.swiglu_limit,
        )

    def compute(self, kernels: Kernels, rows: slice = slice(None), threads: int = 1) -> torch.Tensor:
        x, tokens = self.x[rows].contiguous(), self.tokens[rows].contiguous()
        out = torch.empty_like(x)
        kernels.call("kernels_experts", self.structure(kernels), tokens, x, len(x), out, threads)
        return out

    def route(self, kernels: Kernels) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (ROWS, self.config.num_experts_per_tok)
        ids, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
        kernels.call("kernels_route", self.structure(kernels), self.tokens, self.x, ROWS, ids, weights, 1)
        return ids, weights


@pytest.mark.parametrize("case", CASES)
def test_routing_is_that_of_the_python_module(case: str) -> None:
    layer = Layer(case)
    ids, weights = layer.route(Kernels())
    wanted_ids, wanted_weights = layer.python.gate(layer.x, layer.tokens)
    assert torch.equal(ids.long(), wanted_ids)
    torch.testing.assert_close(weights, wanted_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_experts_are_near_the_python_module(case: str, dtype: torch.dtype) -> None:
    layer = Layer(case, dtype)
    wanted = layer.python(layer.x, layer.tokens, ROWS)
    torch.testing.assert_close(layer.compute(Kernels()), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("quantized", ["routed", "shared", "all"])
@pytest.mark.parametrize("case", CASES)
def test_inputs_are_rounded_where_the_python_module_rounds_them(case: str, quantized: str) -> None:
    """A last bit before a rounding may move a channel by a step of fp8, in few rows; a rounding left out moves all."""
    layer = Layer(case, quantized=quantized)

    def far() -> torch.Tensor:
        wanted: torch.Tensor = layer.python(layer.x, layer.tokens, ROWS)
        return (layer.compute(Kernels()) - wanted).abs().amax(-1) / wanted.abs().max()

    found = far()
    assert found.median() < 1e-6
    assert found.max() < 0.1
    layer.rounds = [False] * len(layer.rounds)
    assert far().quantile(0.1) > 1e-4


@pytest.mark.parametrize("quantized", ["none", "all"])
@pytest.mark.parametrize("case", CASES)
def test_row_does_not_depend_on_the_batch_or_the_threads(case: str, quantized: str) -> None:
    layer, kernels = Layer(case, torch.bfloat16, quantized), Kernels()
    assert_rows_do_not_matter(lambda rows, threads: layer.compute(kernels, rows, threads))


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("quantized", ["none", "all"])
@pytest.mark.parametrize("case", CASES)
def test_experts_are_the_same_bits_on_every_machine(case: str, quantized: str, isa: Isa) -> None:
    layer = Layer(case, quantized=quantized)
    assert torch.equal(bits(layer.compute(Kernels(isa))), bits(layer.compute(Kernels())))


@pytest.mark.parametrize("case", ["sixteen", "odd", "no limit"])
def test_eighths_of_the_experts_are_added_as_a_binary_tree_and_the_shared_expert_last(case: str) -> None:
    """What a machine would compute that has only an eighth of the experts is what is added here."""
    layer = Layer(case)
    whole = layer.compute(Kernels())
    n = layer.config.n_routed_experts
    down = [expert.w2.weight.data.clone() for expert in (*layer.python.experts, layer.python.shared_experts)]

    def only(mine: list[int]) -> torch.Tensor:
        for e, expert in enumerate((*layer.python.experts, layer.python.shared_experts)):
            expert.w2.weight.data = down[e] if e in mine else torch.zeros_like(down[e])
        return layer.compute(Kernels())

    parts = [only([e for e in range(n) if e * 8 // n == i]) for i in range(8)]
    pairs = [parts[i] + parts[i + 1] for i in range(0, 8, 2)]
    routed = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    assert torch.equal(routed + only([n]), whole)


def test_equal_scores_pick_the_lower_ids_and_a_nan_counts_as_largest() -> None:
    layer = Layer("sixteen")
    layer.python.gate.weight.data.zero_()
    layer.python.gate.bias.data.zero_()
    layer.python.gate.bias.data[9] = 1
    layer.python.gate.bias.data[13] = float("nan")
    ids, weights = layer.route(Kernels())
    assert ids.tolist() == [[13, 9, 0, 1]] * ROWS
    assert weights.isfinite().all()


def test_nan_stays_in_its_row() -> None:
    layer, kernels = Layer("sixteen"), Kernels()
    clean = layer.compute(kernels)
    layer.x[1, 5] = float("nan")
    out = layer.compute(kernels)
    assert out[1].isnan().all()
    others = [r for r in range(ROWS) if r != 1]
    assert torch.equal(out[others], clean[others])
