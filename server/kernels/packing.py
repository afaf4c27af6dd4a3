"""A checkpoint's weights in the layout of the kernels: packed once, when it is loaded, and the originals dropped."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from server.kernels import abi
from server.kernels.large_pages import LargePages
from server.kernels.stored import StoredMatrices
from server.model.config import CSA, SLIDING, CheckpointError
from server.model.network import DeepseekV4
from server.model.numerics import OFFICIAL

DTYPES = {torch.float32: abi.Dtype.FP32, torch.bfloat16: abi.Dtype.BF16}


@dataclass(frozen=True)
class PackedWeights:
    """The structures of a network without its pools (:mod:`.binding` adds them) and without its rotations.

    ``memory`` is what they point to, ``stored`` has the weights that stay in their files, if they do. ``draft`` is None
    where the draft layer was not loaded.
    """

    layers: ctypes.Array[abi.Layer]
    draft: abi.Draft | None
    network: abi.Network
    memory: list[Any] = field(repr=False)
    stored: StoredMatrices | None = None


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
        self.stored = None if model.stored is None else StoredMatrices(model.stored, library)
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
        network = abi.Network(
            head=self.head(""),
            lm_head=self.matrix("head.weight"),
            n_layers=len(layers),
            vocab=config.vocab_size,
            hidden=config.hidden_size,
            streams=config.hc_mult,
            streams_dtype=DTYPES[self.dtype],
        )
        self.embed(network, "embed.weight")
        if self.tensors:
            raise RuntimeError(f"no kernel takes the weight {next(iter(self.tensors))}")
        return PackedWeights(layers, draft, network, self.memory, self.stored)

    def embed(self, network: abi.Network, name: str) -> None:
        if self.is_stored(name) and self.stored is not None:
            network.stored_embedding = self.stored.table(name)
            return
        table = self.copy(self.tensors.pop(name))
        network.embedding, network.embedding_dtype = table.data_ptr(), DTYPES[table.dtype]

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
        packed = abi.Attention(
            in_proj=self.matrix(*(f"{key}{name}.weight" for name in into)),
            q_proj=self.matrix(*(f"{key}{name}.weight" for name in queries)),
            wo_a=self.row_groups(f"{key}wo_a.weight"),
            wo_b=self.column_groups(f"{key}wo_b.weight"),
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
        """The matrices ``[out, in]`` of these names, one below the other, as one."""
        is_quantized = names[0] in self.quantized
        if any((name in self.quantized) != is_quantized for name in names):
            raise CheckpointError(f"of {', '.join(names)} some are quantized and some are not")
        made = self._stored_or_packed(names)
        made.quantized_input = is_quantized
        return made

    def _stored_or_packed(self, names: Sequence[str]) -> abi.Matrix:
        is_stored = [self.is_stored(name) for name in names]
        if self.stored is not None and all(is_stored):
            return self.stored.matrix(*names)
        if any(is_stored):
            raise CheckpointError(f"of {', '.join(names)} some cannot stay in their files: use --weights dequantized")
        parts = [self.tensors.pop(name) for name in names]
        packed: abi.Matrix = self.groups([parts[0] if len(parts) == 1 else torch.cat(parts)]).first
        return packed

    def is_stored(self, name: str) -> bool:
        """Whether a weight stays in its file; then there is nothing else of it."""
        if self.stored is None or name not in self.stored:
            return False
        self.tensors.pop(name, None)
        return True

    def row_groups(self, name: str) -> abi.GroupedMatrix:
        """``wo_a``: each group's rows. The reference dequantizes it, so its input is not quantized."""
        if self.is_stored(name) and self.stored is not None:
            return self.stored.row_groups(name, self.config.o_groups)
        return self.groups(list(self.tensors.pop(name).chunk(self.config.o_groups, dim=0)))

    def column_groups(self, name: str) -> abi.GroupedMatrix:
        """``wo_b``: each group's columns."""
        if self.is_stored(name) and self.stored is not None:
            made = self.stored.column_groups(name, self.config.o_groups)
        else:
            made = self.groups(list(self.tensors.pop(name).chunk(self.config.o_groups, dim=1)))
        made.first.quantized_input = name in self.quantized
        return made

    def groups(self, matrices: Sequence[torch.Tensor]) -> abi.GroupedMatrix:
        """Equal matrices ``[out, in]``, each packed by itself, one after the other in memory."""
        n_out, n_in = matrices[0].shape
        dtype = DTYPES[matrices[0].dtype]
        nbytes = self.library.kernels_packed_nbytes(n_out, n_in, dtype)
        memory = self.pages.take(len(matrices) * nbytes).view(len(matrices), nbytes)
        self.memory.append(memory)
        made = [abi.Matrix() for _ in matrices]
        for matrix, place, packed in zip(matrices, memory, made, strict=True):
            source = matrix.contiguous()
            self.library.kernels_pack(source.data_ptr(), n_out, n_in, dtype, place.data_ptr(), packed)
        return abi.GroupedMatrix(first=made[0], stride=nbytes, groups=len(matrices))
