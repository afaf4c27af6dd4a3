"""Sliding-window attention in blocks for training: the cost grows with S * W instead of S * S."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV4ForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from . import rounding

NAME = "banded"


def banded_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """transformers' eager attention of DeepSeek-V4 for whole, cache-free sequences.

    `query` is [B, H, S, d], `key` (= `value`) [B, 1, S + T, d] with the T compressed rows last, and S a multiple of
    the window. Of `mask` only the last T columns are read. Returns the output [B, S, H, d] and the probabilities of
    the compressed rows [B, H, S, T]. Where `module.rounded` is set, all rows are read as fp8 stores them.
    """
    if getattr(module, "rounded", False):
        key = rounding.kv_rows(key, module.config.qk_rope_head_dim)
    batch, n_heads, n_tokens, dim = query.shape
    window = int(module.sliding_window)
    n_blocks, n_entries = n_tokens // window, key.shape[2] - n_tokens

    # [B, blocks, H * W, d] against the keys of the own and the previous block [B, blocks, 2W, d]
    blocks = query.view(batch, n_heads, n_blocks, window, dim).transpose(1, 2).reshape(batch, n_blocks, -1, dim)
    own = key[:, 0, :n_tokens].reshape(batch, n_blocks, window, dim)
    keys = torch.cat([F.pad(own[:, :-1], (0, 0, 0, 0, 1, 0)), own], dim=2)
    near = (blocks @ keys.transpose(-1, -2) * scaling).view(batch, n_blocks, n_heads, window, 2 * window)
    near = near.masked_fill(~_band(n_blocks, window), float("-inf"))

    sinks = module.sinks.view(1, 1, n_heads, 1, 1).expand(batch, n_blocks, -1, window, 1)
    logits = [near, sinks]
    if n_entries:
        entries = key[:, :, n_tokens:]  # [B, 1, T, d]
        far = blocks @ entries.transpose(-1, -2) * scaling
        bias = mask[..., -n_entries:].view(batch, n_blocks, 1, window, n_entries)
        logits.append(far.view(batch, n_blocks, n_heads, window, n_entries) + bias)
    probabilities = torch.cat(logits, dim=-1).softmax(-1).flatten(2, 3)  # [B, blocks, H * W, 2W + 1 + T]

    output = probabilities[..., : 2 * window] @ keys
    far_probabilities = probabilities[..., 2 * window + 1 :]
    if n_entries:
        output = output + far_probabilities @ entries
    output = output.view(batch, n_blocks, n_heads, window, dim).transpose(2, 3).reshape(batch, n_tokens, n_heads, dim)
    far_probabilities = far_probabilities.view(batch, n_blocks, n_heads, window, n_entries)
    return output, far_probabilities.transpose(1, 2).reshape(batch, n_heads, n_tokens, n_entries)


def _band(n_blocks: int, window: int) -> Tensor:
    """Which of the 2W keys a query of its block sees: [blocks, 1, W, 2W]."""
    query, key = torch.arange(window).view(-1, 1), torch.arange(2 * window).view(1, -1)
    band = (key > query) & (key <= query + window)
    bands = band.expand(n_blocks, 1, -1, -1).clone()
    bands[0] &= key >= window
    return bands


ALL_ATTENTION_FUNCTIONS.register(NAME, banded_attention)


def banded_logits(model: DeepseekV4ForCausalLM, ids: Tensor) -> Tensor:
    """Logits [B, S, V] with banded attention, which brings its own window mask and reads no other."""
    no_mask = torch.zeros(ids.shape[0], 1, ids.shape[1], 0)
    logits: Tensor = model(input_ids=ids, attention_mask={"window": no_mask}, use_cache=False).logits
    return logits
