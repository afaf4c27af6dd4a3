"""``python -m server.doctor.trials NAME ...``: trials with native code. Reads what they are about as JSON from standard
input, and writes a line with the findings of each to standard output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.doctor.findings import Finding, error, ok, warning
from server.node.checks import check_device, check_model
from server.sizes import size

if TYPE_CHECKING:
    import torch

    from server.chat.registry import ChatSettings
    from server.engine.tokenizer import Tokenizer

TRANSFER_NBYTES = 1 << 20
TRANSFER_S = 20.0


def try_torch(request: dict[str, Any]) -> list[Finding]:
    subject = "torch"
    try:
        import torch
    except Exception as reason:  # noqa: BLE001  (a library that does not load raises what it likes)
        return [error(subject, f"cannot be imported ({type(reason).__name__}: {reason}): run scripts/setup again")]
    words = f"{torch.__version__}, {request['device']}"
    if request["device"] == "cpu":
        return [ok(subject, words)]
    check_device(request["device"])
    free, _ = torch.cuda.mem_get_info(request["device"])
    words = f"{words} ({torch.cuda.get_device_name(request['device'])}), {size(free)} free"
    if request["device_nbytes"] > free:
        return [error(subject, f"{words}, {size(request['device_nbytes'])} needed: give fewer --pages or --slots")]
    return [ok(subject, words)]


def try_kernels(request: dict[str, Any]) -> list[Finding]:
    from server.kernels.choice import PYTHON, choose_kernels

    kernels = choose_kernels(request["kernels"], request["device"])
    words = f"{kernels.identity} ({kernels.reason})"
    if kernels.name == PYTHON and request["kernels"] != PYTHON and request["device"] == "cpu":
        return [warning("kernels", f"the model in Python would run, many times slower: {kernels.reason}")]
    return [ok("kernels", words)]


def try_tensors(request: dict[str, Any]) -> list[Finding]:
    from server.model.checkpoint import has_draft
    from server.model.loader import check_tensors
    from server.model.numerics import NUMERICS

    model = Path(request["model"])
    check_model(model)
    draft = has_draft(model) if request["draft"] is None else request["draft"]
    n_tensors = check_tensors(model, draft=draft, numerics=NUMERICS[request["numerics"]])
    return [ok("tensors", f"all {n_tensors} are there in the shapes and number formats of config.json")]


def try_tokenizer(request: dict[str, Any]) -> list[Finding]:
    """It loads, fits the model's vocabulary, has an end; and the chat format that the node would take."""
    from server.chat.registry import ChatSettings
    from server.engine.tokenizer import Tokenizer
    from server.model.config import CheckpointError, load_config

    model = Path(request["model"])
    check_model(model)
    config = load_config(model)
    try:
        loaded = Tokenizer.load(model)
    except (OSError, CheckpointError):
        raise
    except Exception as reason:
        raise CheckpointError(f"{model}: the tokenizer cannot be loaded: {reason!r}") from reason
    words = f"{loaded.vocab_size:,} tokens, {config.vocab_size:,} rows in the model"
    if loaded.vocab_size > config.vocab_size:
        end = "a token without a row could not be computed; give the checkpoint its tokenizer"
        found = error("tokenizer", f"{words}: {end}")
    elif not loaded.eos_token_ids:
        end = "no token that ends an answer: give tokenizer_config.json an eos_token"
        found = warning("tokenizer", f"{words}, {end}")
    else:
        found = ok("tokenizer", words)
    return [found, _chat(loaded, ChatSettings(*request["chat"]))]


def _chat(tokenizer: Tokenizer, settings: ChatSettings) -> Finding:
    from server.chat.formats import TemplateFormat
    from server.chat.registry import ChatFormatMissing, chat_format

    try:
        chat = chat_format(tokenizer, settings)
    except ChatFormatMissing as reason:
        return error("chat", f"{reason}: choose another --chat-format")
    if chat.name == TemplateFormat.name and not tokenizer.chat_template:
        return warning("chat", "no chat template: /v1/chat/completions is refused; add a chat_template.jinja")
    return ok("chat", str(chat))


def try_transfer(request: dict[str, Any]) -> list[Finding]:
    """One write from one Mooncake endpoint to another; the digest of what arrived says whether it did."""
    import xxhash

    from server.transfer.engines.base import PieceStatus, open_registered
    from server.transfer.engines.mooncake import MooncakeEngine

    source, target = _regions(request["device"])

    def endpoint() -> MooncakeEngine:
        return MooncakeEngine(request["host"], transport=request["transport"])

    sender = open_registered(endpoint, source.ptr, TRANSFER_NBYTES)
    receiver = open_registered(endpoint, target.ptr, TRANSFER_NBYTES)
    began = time.monotonic()
    ticket = sender.submit(receiver.session, source.ptr, target.ptr, TRANSFER_NBYTES)
    while (status := sender.poll(ticket)) is PieceStatus.RUNNING and time.monotonic() - began < TRANSFER_S:
        time.sleep(1e-4)
    took_ms = 1000 * (time.monotonic() - began)
    transport = receiver.transport
    if status is PieceStatus.RUNNING:
        return [error("transfer", f"{TRANSFER_NBYTES >> 20} MiB over {transport} did not end within {TRANSFER_S:g} s")]
    if status is not PieceStatus.APPLIED:
        return [error("transfer", f"a write over {transport} ended as {status}: is {request['host']} this machine's?")]
    sender.close()
    receiver.close()
    sent, arrived = (xxhash.xxh3_64(region.read()).hexdigest() for region in (source, target))
    if sent != arrived:
        return [error("transfer", f"digest {arrived} arrived, {sent} was sent over {transport}: do not use this build")]
    what = f"{TRANSFER_NBYTES >> 20} MiB of {request['device']} memory"
    words = f"{what} over {transport} in {took_ms:.1f} ms, digest {arrived} on both sides"
    if request["transport"] == "auto" and transport.startswith("tcp"):
        words += "; no RDMA card was found"
    return [ok("transfer", words)]


@dataclass(frozen=True)
class _Region:
    """Memory of the kind that a node would register."""

    ptr: int
    read: Callable[[], bytes]


def _regions(device: str) -> tuple[_Region, _Region]:
    """Random bytes, and as many zeros. Without a GPU torch is not needed."""
    data = os.urandom(TRANSFER_NBYTES)
    if device == "cpu":
        import numpy as np

        arrays = np.frombuffer(data, np.uint8).copy(), np.zeros(TRANSFER_NBYTES, np.uint8)
        source, target = (_Region(array.ctypes.data, array.tobytes) for array in arrays)
    else:
        import torch

        there = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        tensors = there, torch.zeros_like(there)
        torch.cuda.synchronize(device)
        source, target = (_Region(tensor.data_ptr(), _reader(tensor)) for tensor in tensors)
    return source, target


def _reader(tensor: torch.Tensor) -> Callable[[], bytes]:
    return lambda: bytes(tensor.cpu().numpy())


TRIALS: dict[str, Callable[[dict[str, Any]], list[Finding]]] = {
    "torch": try_torch,
    "kernels": try_kernels,
    "tensors": try_tensors,
    "tokenizer": try_tokenizer,
    "transfer": try_transfer,
}


def main(names: Sequence[str]) -> None:
    """Findings of each trial, whatever happens in it. Nothing but findings gets to standard output."""
    answers = os.dup(1)
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    for name in names:
        try:
            found = TRIALS[name](request)
        except Exception as reason:  # noqa: BLE001  (it is the finding)
            typed = type(reason).__module__.startswith("server.")
            found = [error(name, str(reason) if typed else f"{type(reason).__name__}: {reason}")]
        os.write(answers, json.dumps([asdict(finding) for finding in found]).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
