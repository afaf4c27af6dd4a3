"""The NextN layer written down once more: no cache, no pools, one request, whole matrices. An oracle for the tests."""

from __future__ import annotations

import torch

from server.model.config import ModelConfig

Tensors = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor | None = None, eps: float = 1e-6) -> torch.Tensor:
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def rotate(x: torch.Tensor, positions: torch.Tensor, dim: int, theta: float, sign: float) -> torch.Tensor:
    """x [S, H, d]: the last ``dim`` channels by explicit 2 x 2 rotations of neighbouring channels."""
    out = x.clone()
    for i in range(dim // 2):
        angle = sign * positions.double() / theta ** (2 * i / dim)
        c, s = angle.cos().float()[:, None], angle.sin().float()[:, None]
        a, b = x[..., x.shape[-1] - dim + 2 * i], x[..., x.shape[-1] - dim + 2 * i + 1]
        out[..., x.shape[-1] - dim + 2 * i] = a * c - b * s
        out[..., x.shape[-1] - dim + 2 * i + 1] = a * s + b * c
    return out


def hyper(t: Tensors, site: str, streams: torch.Tensor, config: ModelConfig) -> tuple[torch.Tensor, ...]:
    n = config.hc_mult
    v = streams.flatten(1)
    mix = (v @ t[f"mtp.0.hc_{site}_fn"].T) / torch.sqrt((v * v).mean(-1, keepdim=True) + config.rms_norm_eps)
    scale, base = t[f"mtp.0.hc_{site}_scale"], t[f"mtp.0.hc_{site}_base"]
    pre = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + config.hc_eps
    post = 2 * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    comb = torch.softmax((mix[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n), -1) + config.hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + config.hc_eps)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(2, keepdim=True) + config.hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + config.hc_eps)
    return torch.einsum("sn,snd->sd", pre, streams), post, comb


def attention(t: Tensors, x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    s, h, d, r = x.shape[0], config.num_attention_heads, config.head_dim, config.rope_dim
    pos = torch.arange(s)
    q = (rms(x @ t["mtp.0.attn.wq_a.weight"].T, t["mtp.0.attn.q_norm.weight"]) @ t["mtp.0.attn.wq_b.weight"].T).view(
        s, h, d
    )
    q = rotate(rms(q), pos, r, config.rope_theta, 1.0)
    kv = rotate(
        rms(x @ t["mtp.0.attn.wkv.weight"].T, t["mtp.0.attn.kv_norm.weight"])[:, None], pos, r, config.rope_theta, 1.0
    )[:, 0]
    out = torch.zeros(s, h, d)
    for i in range(s):
        keys = kv[max(0, i - config.sliding_window + 1) : i + 1]
        score = q[i] @ keys.T / d**0.5
        weights = torch.softmax(torch.cat([score, t["mtp.0.attn.attn_sink"][:, None]], 1), 1)[:, :-1]
        out[i] = weights @ keys
    out = rotate(out, pos, r, config.rope_theta, -1.0).reshape(s, config.o_groups, -1)
    wo_a = t["mtp.0.attn.wo_a.weight"].view(config.o_groups, config.o_lora_rank, -1)
    return torch.einsum("sgi,goi->sgo", out, wo_a).flatten(1) @ t["mtp.0.attn.wo_b.weight"].T


def expert(t: Tensors, stem: str, x: torch.Tensor, limit: float) -> torch.Tensor:
    gate = (x @ t[f"{stem}.w1.weight"].T).clamp(max=limit)
    up = (x @ t[f"{stem}.w3.weight"].T).clamp(-limit, limit)
    return (torch.nn.functional.silu(gate) * up) @ t[f"{stem}.w2.weight"].T


def moe(t: Tensors, x: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    out = expert(t, "mtp.0.ffn.shared_experts", x, config.swiglu_limit)
    scores = torch.sqrt(torch.nn.functional.softplus(x @ t["mtp.0.ffn.gate.weight"].T))
    for i, row in enumerate(scores):
        ids = (row + t["mtp.0.ffn.gate.bias"]).topk(config.num_experts_per_tok).indices
        for e in ids.tolist():
            weight = row[e] / row[ids].sum() * config.routed_scaling_factor
            out[i] = out[i] + weight * expert(t, f"mtp.0.ffn.experts.{e}", x[i : i + 1], config.swiglu_limit)[0]
    return out


def plain_nextn(
    t: Tensors, streams: torch.Tensor, next_ids: list[int], config: ModelConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams ``[S, N, D]`` of positions 0.. and the token after each -> the layer's streams and logits ``[S, V]``."""
    e = rms(t["embed.weight"][next_ids], t["mtp.0.enorm.weight"]) @ t["mtp.0.e_proj.weight"].T
    h = rms(streams, t["mtp.0.hnorm.weight"]) @ t["mtp.0.h_proj.weight"].T
    x = e[:, None] + h
    for site, norm, sublayer in (("attn", "attn_norm", attention), ("ffn", "ffn_norm", moe)):
        inner, post, comb = hyper(t, site, x, config)
        out = sublayer(t, rms(inner, t[f"mtp.0.{norm}.weight"]), config)
        x = post[:, :, None] * out[:, None] + torch.einsum("sjk,sjd->skd", comb, x)
    v = x.flatten(1)
    mix = (v @ t["mtp.0.hc_head_fn"].T) / torch.sqrt((v * v).mean(-1, keepdim=True) + config.rms_norm_eps)
    weights = torch.sigmoid(mix * t["mtp.0.hc_head_scale"] + t["mtp.0.hc_head_base"]) + config.hc_eps
    y = torch.einsum("sn,snd->sd", weights, x)
    return x, rms(y, t["mtp.0.norm.weight"]) @ t["head.weight"].T
