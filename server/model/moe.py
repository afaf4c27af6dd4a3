"""Mixture of experts: hash or top-k routing, clamped SwiGLU experts, one shared expert."""

from __future__ import annotations

import torch
from torch import nn

from server.model.batch_invariant import softplus, swiglu_
from server.model.config import ModelConfig
from server.model.layers import Linear, matmul_rows
from server.model.numerics import NumericsLayer


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)``, in fp32; a limit of 0 means none. Overwrites both."""
    if limit:
        gate.clamp_(max=limit)
        up.clamp_(-limit, limit)
    return swiglu_(gate, up)


class Expert(nn.Module):
    """SwiGLU with both branches clamped: ``w2(silu(min(w1 x, limit)) * clamp(w3 x, -limit, limit))``, activations in
    fp32.
    """

    def __init__(self, config: ModelConfig, row_tile: int, dtype: torch.dtype) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.moe_intermediate_size
        self.w1 = Linear(d, inner, row_tile, dtype)
        self.w2 = Linear(inner, d, row_tile, dtype)
        self.w3 = Linear(d, inner, row_tile, dtype)
        self.limit = config.swiglu_limit

    def forward(self, x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        """``[rows, D] -> [rows, D]`` in fp32; ``weights`` ``[rows, 1]`` scale the activation before ``w2``."""
        act = clamped_swiglu(self.w1(x).float(), self.w3(x).float(), self.limit)
        if weights is not None:
            act.mul_(weights)
        out: torch.Tensor = self.w2(act.to(x.dtype))
        return out.float()


class Gate(nn.Module):
    """The router. Keys ``gate.weight`` ``[E, D]`` and, by kind of layer, ``gate.bias`` ``[E]`` or ``gate.tid2eid``
    ``[V, top_k]``.
    """

    def __init__(self, config: ModelConfig, layer_id: int, row_tile: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(config.n_routed_experts, config.hidden_size, dtype=torch.float32), requires_grad=False
        )
        self.is_hash = layer_id < config.num_hash_layers
        if self.is_hash:
            shape = (config.vocab_size, config.num_experts_per_tok)
            self.tid2eid = nn.Parameter(torch.empty(shape, dtype=torch.int64), requires_grad=False)
        else:
            self.bias = nn.Parameter(torch.empty(config.n_routed_experts, dtype=torch.float32), requires_grad=False)
        self.top_k, self.scale, self.row_tile = config.num_experts_per_tok, config.routed_scaling_factor, row_tile

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Expert ids ``[rows, top_k]`` and their weights, which sum to ``routed_scaling_factor``. The bias only
        selects.
        """
        scores = softplus(matmul_rows(x.float(), self.weight, self.row_tile)).sqrt_()
        ids = self.tid2eid[token_ids] if self.is_hash else (scores + self.bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        return ids, weights / weights.sum(-1, keepdim=True) * self.scale


class MoE(NumericsLayer):
    """Routed experts plus the shared one, keys ``ffn.*``.

    Where the router picks at least half of the experts anyway, all of them compute every row, as one wide expert: a
    few large operations instead of many small ones. Otherwise each expert computes its own rows; on a GPU all do so in
    one grouped product, since to call them one by one the host would have to read back how many rows each has.
    """

    def __init__(self, config: ModelConfig, layer_id: int, row_tile: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Gate(config, layer_id, row_tile)
        self.experts = nn.ModuleList([Expert(config, row_tile, dtype) for _ in range(config.n_routed_experts)])
        self.shared_experts = Expert(config, row_tile, dtype)
        self.row_tile, self.limit = row_tile, config.swiglu_limit
        self.all_compute = config.n_routed_experts <= 2 * config.num_experts_per_tok
        self._wide: tuple[torch.Tensor, torch.Tensor] | None = None
        self._stack: tuple[torch.Tensor, torch.Tensor, str] | None = None

    def forward(self, x: torch.Tensor, token_ids: torch.Tensor, n_rows: int) -> torch.Tensor:
        """``[rows, D] -> [rows, D]``. Only the first ``n_rows`` rows need experts, the others are padding.

        Experts are added in ascending order, so that a row's sum does not depend on the other rows.
        """
        ids, weights = self.gate(x, token_ids)
        if self.all_compute and self.numerics.wide_experts:
            return self._all_experts(x, ids, weights).to(x.dtype)
        if x.device.type != "cpu":
            return self.grouped_experts(x, ids, weights, n_rows).to(x.dtype)
        return self._chosen_experts(x, ids, weights, n_rows).to(x.dtype)

    def _chosen_experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, n_rows: int) -> torch.Tensor:
        out: torch.Tensor = self.shared_experts(x)
        chosen = ids[:n_rows].flatten()
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=len(self.experts)).tolist()
        start = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count == 0:
                continue
            picks = order[start : start + count]
            start += count
            if self.row_tile and (missing := -count % self.row_tile):
                picks = torch.cat([picks, picks.new_zeros(missing)])
            rows = picks // ids.shape[1]
            y = expert(x[rows], weights.flatten()[picks].unsqueeze(-1))
            out.index_add_(0, rows[:count], y[:count])
        return out

    def grouped_experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, n_rows: int) -> torch.Tensor:
        """What :meth:`_chosen_experts` computes, without knowing on the host which expert has how many rows.

        ``grouped_mm`` reads that on the device for bfloat16 on GPUs of compute capability 9.0 and 10.0. For other
        dtypes and GPUs torch's own fallback reads it back: right, but the host waits (torch 2.13, ``GroupedBlas.cpp``).
        """
        gate_up, down, stored_as = self._stacked()
        top_k = ids.shape[1]
        ids, ascending = ids[:n_rows].sort(dim=-1)
        experts, order = ids.flatten().sort(stable=True)
        every = torch.arange(len(self.experts), device=x.device)
        ends = torch.searchsorted(experts, every, right=True, out_int32=True)
        given = self.numerics.linear_input(x, stored_as)[order // top_k]
        both = nn.functional.grouped_mm(given, gate_up.transpose(1, 2), offs=ends).float()
        gate, up = both.chunk(2, dim=-1)
        act = clamped_swiglu(gate, up, self.limit)
        act.mul_(weights[:n_rows].gather(1, ascending).flatten()[order].unsqueeze(-1))
        given = self.numerics.linear_input(act.to(x.dtype), stored_as)
        y = nn.functional.grouped_mm(given, down.transpose(1, 2), offs=ends).float()
        picks = torch.empty_like(y).index_copy_(0, order, y).unflatten(0, (n_rows, top_k))
        out: torch.Tensor = self.shared_experts(x)
        for i in range(top_k):
            out[:n_rows].add_(picks[:, i])
        return out

    def _stacked(self) -> tuple[torch.Tensor, torch.Tensor, str]:
        """``w1`` over ``w3`` of every expert, ``[E, 2 I, D]``, every ``w2``, ``[E, D, I]``, and how the checkpoint
        stores them all. Made once: the experts' own weights become views of these, so that memory holds them once.
        """
        if self._stack is None:
            every = [expert for expert in self.experts if isinstance(expert, Expert)]
            gate_up = torch.stack([torch.cat([expert.w1.weight, expert.w3.weight]) for expert in every])
            for expert, (w1, w3) in zip(every, gate_up.unflatten(1, (2, -1)), strict=True):
                expert.w1.weight, expert.w3.weight = _frozen(w1), _frozen(w3)
            down = torch.stack([expert.w2.weight for expert in every])
            for expert, w2 in zip(every, down, strict=True):
                expert.w2.weight = _frozen(w2)
            self._stack = gate_up, down, every[0].w1.quantized
        return self._stack

    def _all_experts(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Every expert over every row; those a row did not choose have weight 0, the shared one comes last with weight
        1.
        """
        gate_up, down = self._side_by_side()
        share = weights.new_zeros(x.shape[0], len(self.experts) + 1)
        share.scatter_(1, ids, weights)[:, -1] = 1
        step = self.row_tile or x.shape[0]
        parts = []
        for i in range(0, x.shape[0], step):
            both = nn.functional.linear(x[i : i + step], gate_up).float()
            gate, up = both.view(step, 2, share.shape[1], -1).unbind(1)
            act = clamped_swiglu(gate, up, self.limit).mul_(share[i : i + step].unsqueeze(-1))
            parts.append(nn.functional.linear(act.flatten(1).to(x.dtype), down))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _side_by_side(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every ``w1``, then every ``w3``, as ``[2 (E + 1) I, D]``, and every ``w2`` as ``[D, (E + 1) I]``: copied
        once, or at every use where they stay in their files.
        """
        if self._wide is None:
            every = [e for e in (*self.experts, self.shared_experts) if isinstance(e, Expert)]
            gate_up = torch.cat([*(e.w1.matrix() for e in every), *(e.w3.matrix() for e in every)])
            wide = gate_up, torch.cat([e.w2.matrix() for e in every], dim=1)
            if self.shared_experts.w1.stored is not None:
                return wide
            self._wide = wide
        return self._wide


def _frozen(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
