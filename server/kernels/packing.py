"""A checkpoint's weights in the layout of the kernels: packed once, when it is loaded, and the originals dropped."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from server.kernels import abi
from server.kernels.large_pages import LargePages
from server.model.config import CSA, SLIDING, CheckpointError
from server.model.network import DeepseekV4
from server.model.numerics import OFFICIAL

DTYPES = {torch.float32: abi.Dtype.FP32, torch.bfloat16: abi.Dtype.BF16}


@dataclass(frozen=True)
class PackedWeights:
    """The structures of a network without its pools (:mod:`.binding` adds them) and without its rotations.

    ``memory`` is what they point to. ``draft`` is None where the draft layer was not loaded.
    """

    layers: ctypes.Array[abi.Layer]
    draft: abi.Draft | None
    network: abi.Network
    memory: list[Any] = field(repr=False)


def pack_weights(model: DeepseekV4, library: ctypes.CDLL) -> PackedWeights:
    """Takes the weights out of ``model``, which cannot compute afterwards, one after the other: at no time there are
    two copies of more than one of them.
    """
    return _Packer(model, library).weights()


class _Packer:
    def __init__(self, model: DeepseekV4, library: ctypes.CDLL) -> None:
        self.config, self.dtype, self.library = model.config, model.dtype, library
        self.drafts = model.drafts
        self.memory: list[Any] = []
        self.pages = LargePages()
        self.official = model.numerics is OFFICIAL
        quantized = [name for name, module in model.named_modules() if getattr(module, "quantized", "")]
        self.quantized = {f"{name}.weight" for name in quantized if self.official}
        self.tensors = {name: parameter.data for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    def weights(self) -> PackedWeights:
        config = self.config
        ratios = config.compress_ratios
        layers = (abi.Layer * len(ratios))(*(self.layer(f"layers.{i}.", ratio) for i, ratio in enumerate(ratios)))
        draft = self.draft() if self.drafts else None
        embedding = self.copy(self.tensors.pop("embed.weight"))
        network = abi.Network(
            embedding=embedding.data_ptr(),
            head=self.head(""),
            lm_head=self.matrix("head.weight"),
            n_layers=len(layers),
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            streams=config.hc_mult,
            embedding_dtype=DTYPES[embedding.dtype],
            streams_dtype=DTYPES[self.dtype],
        )
        if self.tensors:
            raise RuntimeError(f"no kernel takes the weight {next(iter(self.tensors))}")
        return PackedWeights(layers, draft, network, self.memory)

    # --- parts of a layer ---------------------------------------------------------------------------------------------

    def layer(self, key: str, ratio: int) -> abi.Layer:
        return abi.Layer(
            hc_attn=self.hyper_connection(f"{key}hc_attn.", f"{key}attn_norm.weight"),
            hc_ffn=self.hyper_connection(f"{key}hc_ffn.", f"{key}ffn_norm.weight"),
            attention=self.attention(f"{key}attn.", ratio),
            experts=self.experts(f"{key}ffn."),
        )

    def hyper_connection(self, key: str, norm: str) -> abi.HyperConnection:
        config = self.config
        return abi.HyperConnection(
            fn=self.matrix(f"{key}fn"),
            base=self.vector(f"{key}base"),
            scale=self.vector(f"{key}scale"),
            norm=self.vector(norm),
            streams=config.hc_mult,
            hidden=config.hidden_size,
            iterations=config.hc_sinkhorn_iters,
            hc_eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )

    def head(self, key: str) -> abi.HyperConnection:
        return self.hyper_connection(f"{key}hc_head.", f"{key}norm.weight")

    def attention(self, key: str, ratio: int) -> abi.Attention:
        config = self.config
        into, queries, state = ["wq_a", "wkv"], ["wq_b"], ["compressor.wkv", "compressor.wgate"]
        if ratio == CSA:
            queries.append("indexer.wq_b")
            state += ["indexer.compressor.wkv", "indexer.compressor.wgate"]
        wo_a, wo_b = (self.tensors.pop(f"{key}{name}.weight") for name in ("wo_a", "wo_b"))
        packed = abi.Attention(
            in_proj=self.matrix(*(f"{key}{name}.weight" for name in into)),
            q_proj=self.matrix(*(f"{key}{name}.weight" for name in queries)),
            wo_a=self.groups(list(wo_a.chunk(config.o_groups, dim=0))),  # the reference dequantizes it
            wo_b=self.groups(list(wo_b.chunk(config.o_groups, dim=1)), f"{key}wo_b.weight" in self.quantized),
            q_norm=self.vector(f"{key}q_norm.weight"),
            kv_norm=self.vector(f"{key}kv_norm.weight"),
            sink=self.vector(f"{key}attn_sink"),
            ratio=ratio,
            heads=config.num_attention_heads,
            head_dim=config.head_dim,
            rope_dim=config.rope_dim,
            q_rank=config.q_lora_rank,
            window=config.sliding_window,
            uses_compress_rope=ratio != SLIDING,
            kv_simulation=self.simulation(abi.Simulation.AS_KV_ROW),
            query_simulation=self.simulation(abi.Simulation.AS_INDEX_ROW),
            norm_eps=config.rms_norm_eps,
        )
        if ratio != SLIDING:
            packed.state_proj = self.matrix(*(f"{key}{name}.weight" for name in state))
            packed.compressor = self.compressor(f"{key}compressor.", ratio, config.head_dim, 0)
            packed.compressor.simulation = self.simulation(abi.Simulation.AS_KV_ROW)
        if ratio == CSA:
            columns = 4 * config.head_dim  # wkv and wgate of the two halves are before it
            packed.index_proj = self.matrix(f"{key}indexer.weights_proj.weight")
            packed.index_heads, packed.index_dim = config.index_n_heads, config.index_head_dim
            packed.index_topk = config.index_topk
            packed.indexer = self.compressor(f"{key}indexer.compressor.", ratio, config.index_head_dim, columns)
            packed.indexer.simulation = self.simulation(abi.Simulation.AS_INDEX_ROW)
        return packed

    def compressor(self, key: str, ratio: int, width: int, columns: int) -> abi.Compressor:
        return abi.Compressor(
            ape=self.vector(f"{key}ape"),
            norm=self.vector(f"{key}norm.weight"),
            ratio=ratio,
            width=width,
            columns=columns,
            norm_eps=self.config.rms_norm_eps,
        )

    def experts(self, key: str) -> abi.Experts:
        config = self.config
        names = [f"{key}experts.{i}." for i in range(config.n_routed_experts)] + [f"{key}shared_experts."]
        up = (abi.Matrix * len(names))(*(self.matrix(f"{name}w1.weight", f"{name}w3.weight") for name in names))
        down = (abi.Matrix * len(names))(*(self.matrix(f"{name}w2.weight") for name in names))
        self.memory += [up, down]
        by_token = self.tensors.pop(f"{key}gate.tid2eid", None)
        if by_token is not None and not 0 <= int(by_token.min()) <= int(by_token.max()) < config.n_routed_experts:
            raise CheckpointError(f"{key}gate.tid2eid names an expert that is none of {config.n_routed_experts}")
        return abi.Experts(
            gate=self.matrix(f"{key}gate.weight"),
            up=up,
            down=down,
            bias=None if by_token is not None else self.vector(f"{key}gate.bias"),
            by_token=None if by_token is None else self.copy(by_token).data_ptr(),
            experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            inner=config.moe_intermediate_size,
            hidden=config.hidden_size,
            scale=config.routed_scaling_factor,
            limit=config.swiglu_limit,
        )

    def draft(self) -> abi.Draft:
        return abi.Draft(
            e_norm=self.vector("mtp.0.enorm.weight"),
            h_norm=self.vector("mtp.0.hnorm.weight"),
            e_proj=self.matrix("mtp.0.e_proj.weight"),
            h_proj=self.matrix("mtp.0.h_proj.weight"),
            layer=self.layer("mtp.0.", SLIDING),
            head=self.head("mtp.0."),
            norm_eps=self.config.rms_norm_eps,
        )

    def simulation(self, official: abi.Simulation) -> abi.Simulation:
        """What rows are rounded to: with official numerics ``official``."""
        return official if self.official else abi.Simulation.AS_COMPUTED

    # --- tensors ------------------------------------------------------------------------------------------------------

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy that lives as long as the network. The original may be a view of the whole file."""
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        self.memory.append(tensor)
        return tensor

    def vector(self, name: str) -> int:
        """Where the elements of a small fp32 tensor begin."""
        tensor = self.tensors.pop(name)
        if tensor.dtype != torch.float32:
            raise TypeError(f"{name} is {tensor.dtype}; the kernels read it as float32")
        return self.copy(tensor).data_ptr()

    def matrix(self, *names: str) -> abi.Matrix:
        """The matrices ``[out, in]`` of these names, one below the other, packed as one."""
        parts = [self.tensors.pop(name) for name in names]
        is_quantized = names[0] in self.quantized
        if any((name in self.quantized) != is_quantized for name in names):
            raise CheckpointError(f"of {', '.join(names)} some are quantized and some are not")
        matrix = parts[0] if len(parts) == 1 else torch.cat(parts)
        packed: abi.Matrix = self.groups([matrix], is_quantized).first
        return packed

    def groups(self, matrices: Sequence[torch.Tensor], is_quantized: bool = False) -> abi.GroupedMatrix:
        """Equal matrices ``[out, in]``, each packed by itself, one after the other in memory. ``is_quantized``: what
        they multiply is quantized too where the numerics say so.
        """
        n_out, n_in = matrices[0].shape
        dtype = DTYPES[matrices[0].dtype]
        nbytes = self.library.kernels_packed_nbytes(n_out, n_in, dtype)
        memory = self.pages.take(len(matrices) * nbytes).view(len(matrices), nbytes)
        self.memory.append(memory)
        made = [abi.Matrix() for _ in matrices]
        for matrix, place, packed in zip(matrices, memory, made, strict=True):
            source = matrix.contiguous()
            self.library.kernels_pack(source.data_ptr(), n_out, n_in, dtype, place.data_ptr(), packed)
        made[0].quantized_input = is_quantized
        return abi.GroupedMatrix(first=made[0], stride=nbytes, groups=len(matrices))
