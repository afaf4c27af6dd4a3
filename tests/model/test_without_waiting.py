"""A decode step makes the host wait for nothing: no value is read back, and all index tensors go over in one copy.

The model runs on torch's ``meta`` device here: tensors there have no values, so whatever needs one on the host fails
where it would wait on a GPU: ``item``, ``tolist``, ``nonzero``, an index of booleans, ``bincount``, a copy to the host.
:class:`Copies` sees what comes from the host. That the same is so on a real GPU is a section of scripts/check_cuda.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from server.cache.arena import Arena
from server.cache.device import in_one_copy, select_rows
from server.cache.layout import ArenaLayout, Placement
from server.cache.specs import CacheGeometry
from server.model.batch import Segment, build_batch
from server.model.config import ModelConfig, load_config
from server.model.moe import Expert, MoE
from server.model.network import DeepseekV4, PythonModel
from server.model.numerics import NUMERICS
from server.model.state import state_components
from tests.support.checkpoints import write_checkpoint

META = torch.device("meta")
WHERE = Placement(1, (1, 2))


class Copies(TorchFunctionMode):
    """The calls that bring something of the host to the device: tensors, and lists of numbers that become one. A single
    number goes with the call itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        on_device = any(not tensor.is_cpu for tensor in (*given, *made))
        of_host = any(tensor.is_cpu and tensor.dim() for tensor in given)
        of_host |= func in (torch.tensor, torch.as_tensor)
        of_host |= func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) and any(_lists(args[1]))
        if on_device and of_host:
            self.found.append(str(func))
        return out


def _lists(index: object) -> Iterator[bool]:
    for part in index if isinstance(index, tuple) else (index,):
        yield isinstance(part, list)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """Of a model in which every kind of layer is, and every expert has few rows."""
    path = tmp_path_factory.mktemp("random")
    write_checkpoint(path, draft=True, num_hidden_layers=4, compress_ratios=[0, 4, 128, 4, 0], head_dim=32)
    return load_config(path)


def on_meta(config: ModelConfig, numerics: str, kv_dtype: str, index_dtype: str) -> PythonModel:
    components = state_components(config, "bfloat16", 3, draft=True, kv_dtype=kv_dtype, index_dtype=index_dtype)
    geometry = CacheGeometry(256, 16, 20, config.sliding_window, 3, components)
    with META:
        model = DeepseekV4(config, torch.bfloat16, 0, draft=True, numerics=NUMERICS[numerics]).requires_grad_(False)
    for module in model.modules():
        if isinstance(module, Expert):
            module.w1.quantized = module.w2.quantized = module.w3.quantized = "fp4"
    return PythonModel(model, Arena(ArenaLayout.from_geometry(geometry), META))


def step(model: PythonModel) -> None:
    """Drafts and a verification of two requests, after which an index chooses streams as the draft chain does."""
    ids, other = [5, 6, 7, 8], Placement(2, (4, 3))
    output = model.forward([Segment(ids, 300, WHERE), Segment(ids[:1], 127, other)], every_row=True)
    streams = select_rows(output.streams, [0, 1, 4])
    model.draft([Segment(ids[:2], 299, WHERE), Segment(ids[:1], 126, other)], streams)


@pytest.mark.parametrize("numerics", ["plain", "official"])
@pytest.mark.parametrize(("kv_dtype", "index_dtype"), [("model", "model"), ("fp8", "mxfp4"), ("fp8", "fp8")])
def test_a_decode_step_reads_nothing_back_and_copies_once_a_forward(
    config: ModelConfig, numerics: str, kv_dtype: str, index_dtype: str
) -> None:
    model = on_meta(config, numerics, kv_dtype, index_dtype)
    step(model)  # what is made once: rope frequencies, constants, the experts side by side
    with Copies() as copies:
        step(model)
    assert len(copies.found) == 3, copies.found  # a batch, the chosen rows, the draft's batch


@pytest.mark.parametrize(
    "reading",
    [
        lambda x: x.tolist(),
        lambda x: x[0, 0].item(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.bincount(x.flatten().long()),
    ],
    ids=["tolist", "item", "cpu", "boolean index", "nonzero", "bincount"],
)
def test_the_guard_sees_what_is_read_back(reading: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)meta"):
        reading(torch.empty(2, 3, device=META))


@pytest.mark.parametrize(
    "copying",
    [
        lambda x: x[[1, 2]],
        lambda x: x[:, [1, 2]],
        lambda _: torch.tensor([1, 2], device=META),
        lambda x: x + torch.zeros(3).to(META),
        lambda x: x.copy_(torch.zeros(3)),
    ],
    ids=["index of numbers", "second index", "tensor", "to", "copy_"],
)
def test_the_guard_sees_what_comes_from_the_host(copying: Callable[[torch.Tensor], object]) -> None:
    with Copies() as copies:
        copying(torch.empty(4, 3, device=META))
    assert len(copies.found) == 1


def tensors_of(tree: Any) -> list[torch.Tensor]:
    values = [getattr(tree, each.name) for each in fields(tree)]
    nested = [tensors_of(value) for value in values if is_dataclass(value)]
    return [*(value for value in values if isinstance(value, torch.Tensor)), *(t for part in nested for t in part)]


def test_one_copy_holds_every_index_tensor(config: ModelConfig) -> None:
    components = state_components(config, "float32", 0)
    layout = ArenaLayout.from_geometry(CacheGeometry(256, 16, 20, config.sliding_window, 0, components))
    segments = [Segment([1, 2, 3], 254, WHERE), Segment([4], 1023, Placement(2, (3, 4, 5, 6)))]
    batch = build_batch(segments, layout, 0, torch.device("cpu"))
    copy = in_one_copy(batch, torch.device("cpu"))
    own, copied = tensors_of(batch), tensors_of(copy)
    assert len(own) > 20
    for mine, theirs in zip(own, copied, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    assert len({tensor.untyped_storage().data_ptr() for tensor in copied}) == 1
    assert (copy.n_rows, copy.csa is None, copy.hca is None) == (batch.n_rows, batch.csa is None, batch.hca is None)


@pytest.mark.parametrize("n_rows", [1, 5, 33])
def test_grouped_experts_compute_what_each_computes_alone(
    config: ModelConfig, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(n_rows)
    moe = MoE(config, config.num_hash_layers, 0, torch.float32)
    for parameter in moe.parameters():
        parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    x = torch.randn(n_rows + 2, config.hidden_size)
    ids = torch.zeros(n_rows + 2, dtype=torch.int64)
    alone = moe(x, ids, n_rows)
    before = {name: parameter.clone() for name, parameter in moe.named_parameters()}
    monkeypatch.setattr(MoE, "_chosen_experts", MoE.grouped_experts)
    grouped = moe(x, ids, n_rows)
    assert not torch.equal(grouped, torch.zeros_like(grouped))
    torch.testing.assert_close(grouped, alone, rtol=1e-5, atol=1e-5)
    for name, parameter in moe.named_parameters():
        assert torch.equal(parameter, before[name]), name
    weights = [parameter for name, parameter in moe.named_parameters() if name.endswith("w3.weight")]
    memory = {weight.untyped_storage().data_ptr() for weight in weights if weight is not moe.shared_experts.w3.weight}
    assert len(memory) == 1, "the experts lie in memory twice"
