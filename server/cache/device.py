"""Where pools and weights are: in the host's memory or on one GPU; and the few ways between the two.

A GPU computes behind the host: a call returns when its work is queued. So the host waits in two places alone:

* :meth:`Mark.wait`, before memory goes to somebody else: to the transport, or to another request;
* :func:`to_host`, which brings tokens, logits and bytes back.

Everything runs on the device's default stream, copies too. Over TCP Mooncake copies into GPU memory with ``cudaMemcpy``
from pageable memory, which may return before the bytes are there; a read on the same stream comes after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

ALIGNMENT = 16
"""Bytes at whose multiples the tensors of one copy begin: enough for every dtype."""

T = TypeVar("T")


class Mark:
    """A point behind everything that has been queued on ``device`` so far. On a CPU nothing ever is."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(blocking=True)
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Until all of that is done. What was queued later is not waited for."""
        if self._event is not None:
            self._event.synchronize()


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the host's memory, complete when this returns; itself if it is there already."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A ``tensor`` of the host on ``device``. Nobody waits: a GPU has it before what is queued next."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def select_rows(x: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """``x[rows]``, without waiting for the device as an index of Python numbers does."""
    return x.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), x.device))


def moved(tree: T, device: torch.device) -> T:
    """``tree``, a dataclass of the host's tensors and of more such dataclasses, on ``device`` (:func:`in_one_copy`).

    On the CPU it is there already.
    """
    return tree if device.type == "cpu" else in_one_copy(tree, device)


def in_one_copy(tree: T, device: torch.device) -> T:
    """All tensors of ``tree`` side by side in one piece of memory, copied at once; the tree over that copy."""
    tensors = list(_tensors(tree))
    starts, nbytes = [], 0
    for tensor in tensors:
        starts.append(nbytes)
        nbytes += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for start, tensor in zip(starts, tensors, strict=True):
        host[start : start + tensor.nbytes].copy_(tensor.flatten().view(torch.uint8))
    there = host.to(device, non_blocking=True)
    copies = (
        there[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=True)
    )
    moved_tree: T = _rebuilt(tree, copies)
    return moved_tree


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    for field in fields(tree):
        value = getattr(tree, field.name)
        if isinstance(value, torch.Tensor):
            yield value
        elif is_dataclass(value):
            yield from _tensors(value)


def _rebuilt(tree: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """``tree`` with ``tensors`` in the place of its own, in the order of :func:`_tensors`."""
    changes: dict[str, Any] = {}
    for field in fields(tree):
        value = getattr(tree, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = next(tensors)
        elif is_dataclass(value):
            changes[field.name] = _rebuilt(value, tensors)
    return replace(tree, **changes)
