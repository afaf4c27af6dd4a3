"""The layers of the official forward written down once more: one request, the whole text at once, no pools, in double
precision. An oracle for the tests.

Every rounding has a name in :data:`ROUNDINGS` and can be left out.
"""

from __future__ import annotations

import math

import torch

from server.model.config import CSA, ModelConfig

Tensors = dict[str, torch.Tensor]
Rows = dict[tuple[str, int], torch.Tensor]
"""State rows by component and layer, as a node stores them."""

ROUNDINGS = (
    "linear inputs",
    "expert inputs",
    "window rows",
    "entries",
    "index keys",
    "index queries",
    "transform of keys and queries",
)


# --- number formats ---------------------------------------------------------------------------------------------------


def e4m3_grid() -> torch.Tensor:
    """Every magnitude of E4M3 in order: subnormals ``m 2^-9``, then ``(8 + m) 2^(e - 10)``, without the NaN."""
    subnormal = [m * 2.0**-9 for m in range(8)]
    normal = [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
    return torch.tensor((subnormal + normal)[:-1], dtype=torch.float64)


E4M3, E2M1 = e4m3_grid(), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def on_grid(x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    """The nearest of ``grid`` and its negatives; halfway between two, the one with the even index."""
    size = x.abs().clamp(max=grid[-1].item())
    above = torch.searchsorted(grid, size).clamp(min=1)
    low, high = grid[above - 1], grid[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    return torch.where(up, high, low) * x.sign()


def in_blocks(x: torch.Tensor, block: int, grid: torch.Tensor, floor: float) -> torch.Tensor:
    """Each run of ``block`` channels on ``grid`` times the smallest power of two with which its largest fits."""
    parts = []
    for part in x.split(block, dim=-1):
        largest, top = part.abs().amax(-1, keepdim=True).clamp(min=floor), grid[-1]
        exponent = torch.log2(largest / top).ceil()
        exponent += (largest > top * 2**exponent).double()
        exponent -= (largest <= top * 2 ** (exponent - 1)).double()
        parts.append(on_grid(part / 2**exponent, grid) * 2**exponent)
    return torch.cat(parts, dim=-1)


def fp8(x: torch.Tensor, block: int) -> torch.Tensor:
    return in_blocks(x, block, E4M3, 1e-4)


def fp4(x: torch.Tensor, block: int) -> torch.Tensor:
    return in_blocks(x, block, E2M1, 6 * 2.0**-126)


def transformed(x: torch.Tensor) -> torch.Tensor:
    """Times Sylvester's matrix, divided by the root of its size."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return x @ matrix / math.sqrt(len(matrix))


# --- parts ------------------------------------------------------------------------------------------------------------


def rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def frequencies(config: ModelConfig, ratio: int) -> list[float]:
    dim, yarn = config.rope_dim, config.yarn
    theta = config.compress_rope_theta if ratio else config.rope_theta
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if not ratio or yarn is None:
        return plain
    low, high = (
        dim * math.log(yarn.original_max_position / (2 * math.pi * turns)) / (2 * math.log(theta))
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    first, last = max(math.floor(low), 0), min(math.ceil(high), dim - 1)
    ramp = [min(max((i - first) / max(last - first, 1e-3), 0), 1) for i in range(dim // 2)]
    return [f / yarn.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


def rotate(x: torch.Tensor, positions: torch.Tensor, speeds: list[float], sign: float = 1.0) -> torch.Tensor:
    """``x`` ``[S, ..., d]``: the last channels by explicit rotations of neighbours."""
    out, first = x.clone(), x.shape[-1] - 2 * len(speeds)
    for i, speed in enumerate(speeds):
        angle = (sign * speed * positions.double()).view(-1, *[1] * (x.dim() - 2))
        a, b = x[..., first + 2 * i], x[..., first + 2 * i + 1]
        out[..., first + 2 * i] = a * angle.cos() - b * angle.sin()
        out[..., first + 2 * i + 1] = a * angle.sin() + b * angle.cos()
    return out


class PlainOfficial:
    """``tensors`` of a checkpoint by their official keys, ``quantized`` those of them that are stored quantized."""

    def __init__(
        self, tensors: Tensors, config: ModelConfig, quantized: set[str], without: frozenset[str] = frozenset()
    ) -> None:
        self.t = {name: t.double() if t.is_floating_point() else t for name, t in tensors.items()}
        self.config, self.quantized, self.without = config, quantized, without
        self.rows: Rows = {}
        """Those of the layers that were computed."""

    def draft(self, streams: torch.Tensor, next_ids: list[int]) -> torch.Tensor:
        """The NextN layer: ``streams`` ``[S, N, D]`` of all positions and the token after each -> ``[S, N, D]``."""
        e = self.norm("mtp.0.enorm", self.t["embed.weight"][next_ids])
        h = self.norm("mtp.0.hnorm", streams.double())
        x = self.linear("mtp.0.e_proj", e)[:, None] + self.linear("mtp.0.h_proj", h)
        return self.block("mtp.0", self.config.num_hidden_layers, 0, x, next_ids)

    def rounds(self, name: str) -> bool:
        return name not in self.without

    def norm(self, key: str, x: torch.Tensor) -> torch.Tensor:
        return rms(x, self.config.rms_norm_eps) * self.t[f"{key}.weight"]

    def linear(self, key: str, x: torch.Tensor, rounding: str = "linear inputs") -> torch.Tensor:
        if f"{key}.weight" in self.quantized and self.rounds(rounding):
            x = fp8(x, 128)
        return x @ self.t[f"{key}.weight"].T

    def block(self, key: str, layer: int, ratio: int, x: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """One layer, keys ``<key>.*``: streams ``[S, N, D]`` of tokens ``ids`` -> ``[S, N, D]``."""
        for site in ("attn", "ffn"):
            inner, post, comb = self.hyper(f"{key}.hc_{site}", x)
            inner = self.norm(f"{key}.{site}_norm", inner)
            out = self.attention(key, layer, ratio, inner) if site == "attn" else self.moe(f"{key}.ffn", inner, ids)
            x = post[:, :, None] * out[:, None] + torch.einsum("sjk,sjd->skd", comb, x)
        return x

    def hyper(self, key: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n, eps = self.config.hc_mult, self.config.hc_eps
        mix = rms(x.flatten(1), self.config.rms_norm_eps) @ self.t[f"{key}_fn"].T
        scale, base = self.t[f"{key}_scale"], self.t[f"{key}_base"]
        pre = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = torch.softmax((mix[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n), -1) + eps
        comb = comb / (comb.sum(1, keepdim=True) + eps)
        for _ in range(self.config.hc_sinkhorn_iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + eps)
            comb = comb / (comb.sum(1, keepdim=True) + eps)
        return torch.einsum("sn,snd->sd", pre, x), post, comb

    # --- attention ----------------------------------------------------------------------------------------------------

    def kv_row(self, rows: torch.Tensor, rounding: str) -> torch.Tensor:
        nope = rows.shape[-1] - self.config.rope_dim
        if not self.rounds(rounding):
            return rows
        return torch.cat([fp8(rows[:, :nope], math.gcd(nope, 64)), rows[:, nope:]], dim=1)

    def index_row(self, rows: torch.Tensor, rounding: str) -> torch.Tensor:
        if self.rounds("transform of keys and queries"):
            rows = transformed(rows)
        return fp4(rows, math.gcd(rows.shape[-1], 32)) if self.rounds(rounding) else rows

    def attention(self, key: str, layer: int, ratio: int, x: torch.Tensor) -> torch.Tensor:
        c, n, attn = self.config, len(x), f"{key}.attn"
        positions, speeds = torch.arange(n), frequencies(c, ratio)
        qr = self.norm(f"{attn}.q_norm", self.linear(f"{attn}.wq_a", x))
        q = rms(self.linear(f"{attn}.wq_b", qr).view(n, -1, c.head_dim), c.rms_norm_eps)
        q = rotate(q, positions, speeds)
        kv = rotate(self.norm(f"{attn}.kv_norm", self.linear(f"{attn}.wkv", x)), positions, speeds)
        kv = self.kv_row(kv, "window rows")
        self.rows["swa" if layer < c.num_hidden_layers else "draft_swa", layer] = kv
        entries, chosen = self.compressed(attn, layer, ratio, x, qr)
        out = torch.empty_like(q)
        for t in range(n):
            keys = torch.cat([kv[max(0, t - c.sliding_window + 1) : t + 1], entries[chosen[t]]])
            scores = torch.cat([q[t] @ keys.T / c.head_dim**0.5, self.t[f"{attn}.attn_sink"][:, None]], dim=1)
            out[t] = torch.softmax(scores, 1)[:, :-1] @ keys
        out = rotate(out, positions, speeds, -1.0).reshape(n, c.o_groups, -1)
        wo_a = self.t[f"{attn}.wo_a.weight"].view(c.o_groups, c.o_lora_rank, -1)
        return self.linear(f"{attn}.wo_b", torch.einsum("sgi,goi->sgo", out, wo_a).flatten(1))

    def compressed(
        self, attn: str, layer: int, ratio: int, x: torch.Tensor, qr: torch.Tensor
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """The layer's entries, and which of them each query reads."""
        c, n = self.config, len(x)
        if not ratio:
            return x.new_zeros(0, c.head_dim), [[]] * n
        entries = self.kv_row(self.compressor(f"{attn}.compressor", ratio, c.head_dim, x), "entries")
        self.rows["c4_kv" if ratio == CSA else "c128_kv", layer] = entries
        visible = [(t + 1) // ratio for t in range(n)]
        if ratio != CSA:
            return entries, [list(range(seen)) for seen in visible]
        speeds = frequencies(c, ratio)
        keys = self.compressor(f"{attn}.indexer.compressor", ratio, c.index_head_dim, x)
        keys = self.index_row(keys, "index keys")
        self.rows["c4_index", layer] = keys
        q = self.linear(f"{attn}.indexer.wq_b", qr).view(n, -1, c.index_head_dim)
        q = self.index_row(rotate(q, torch.arange(n), speeds), "index queries")
        weights = self.linear(f"{attn}.indexer.weights_proj", x) / math.sqrt(c.index_head_dim * c.index_n_heads)
        scores = torch.einsum("sh,shi->si", weights, (q @ keys.T).relu())
        best = [scores[t, :seen].sort(descending=True, stable=True).indices for t, seen in enumerate(visible)]
        return entries, [sorted(row[: c.index_topk].tolist()) for row in best]

    def compressor(self, key: str, ratio: int, width: int, x: torch.Tensor) -> torch.Tensor:
        count = len(x) // ratio
        kv, gate = (x[: count * ratio] @ self.t[f"{key}.{name}.weight"].T for name in ("wkv", "wgate"))
        kv, gate = kv.view(count, ratio, -1), gate.view(count, ratio, -1) + self.t[f"{key}.ape"]
        if ratio == CSA:
            before = [
                torch.cat([torch.full_like(part[:1], fill), part[:-1]]) for part, fill in ((kv, 0.0), (gate, -math.inf))
            ]
            kv = torch.cat([before[0][..., :width], kv[..., width:]], dim=1)
            gate = torch.cat([before[1][..., :width], gate[..., width:]], dim=1)
        pooled = (gate.softmax(1) * kv).sum(1)
        return rotate(self.norm(f"{key}.norm", pooled), ratio * torch.arange(count), frequencies(self.config, ratio))

    # --- experts ------------------------------------------------------------------------------------------------------

    def expert(self, key: str, x: torch.Tensor, weight: float | torch.Tensor) -> torch.Tensor:
        limit = self.config.swiglu_limit
        gate, up = (self.linear(f"{key}.{name}", x, "expert inputs") for name in ("w1", "w3"))
        act = torch.nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit) * weight
        return self.linear(f"{key}.w2", act, "expert inputs")

    def moe(self, key: str, x: torch.Tensor, ids: list[int]) -> torch.Tensor:
        out = self.expert(f"{key}.shared_experts", x, 1.0)
        scores = torch.sqrt(torch.nn.functional.softplus(x @ self.t[f"{key}.gate.weight"].T))
        for i, row in enumerate(scores):
            if f"{key}.gate.tid2eid" in self.t:
                chosen = self.t[f"{key}.gate.tid2eid"][ids[i]]
            else:
                chosen = (row + self.t[f"{key}.gate.bias"]).topk(self.config.num_experts_per_tok).indices
            weights = row[chosen] / row[chosen].sum() * self.config.routed_scaling_factor
            for e, weight in zip(chosen.tolist(), weights, strict=True):
                out[i] += self.expert(f"{key}.experts.{e}", x[i : i + 1], weight)[0]
        return out
