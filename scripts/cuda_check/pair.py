"""A prefill and a decode process on one GPU, over Mooncake's TCP, and the same answers from one process alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from cluster import Cluster, Node, Pair, StopSignals
from evaluation.questions import STOP, bundled_questions

from cuda_check.lines import Line

N_QUESTIONS = 6
START_S, ANSWER_S = 60.0, 20.0
Answer = tuple[str, list[str]]


def check(device: torch.device) -> Iterator[Line]:
    logs = Path(tempfile.mkdtemp(prefix="check-cuda-"))
    for dtype in ("float32", "bfloat16"):
        common = ["--device", str(device), "--dtype", dtype, "--pages", "64", "--slots", "8"]
        pair = Pair(logs, common, [*common, "--spec-tokens", "3"], prefix=f"{dtype}-")
        local = ["--local-prefill", "--spec-tokens", "3", *common]
        alone = Node("decode", logs / f"{dtype}-local.log", *local, name="local")
        with StopSignals(), Cluster([*pair.nodes, alone]).running(START_S):
            theirs = [_ask(pair.d, body) for body in _bodies()]
            ours = [_ask(alone, body) for body in _bodies()]
            n_sent = sum(pair.d.transfer_bytes().values())
        same = sum(a == b for a, b in zip(theirs, ours, strict=True))
        found = f"{same} of {len(ours)} as from one process, {n_sent:,} bytes sent"
        yield Line(f"{dtype}: answers of a pair", found, same == len(ours) and n_sent > 0)


def _bodies() -> Iterator[dict[str, Any]]:
    """One at a time, so that both compute in the same shapes: greedy ones, and every third one drawn."""
    for i, (_, prompt) in enumerate(bundled_questions()[:N_QUESTIONS]):
        temperature = 1.0 if i % 3 == 2 else 0.0
        yield {"prompt": prompt, "max_tokens": 48, "temperature": temperature, "seed": i, "logprobs": 1, "stop": STOP}


def _ask(node: Node, body: dict[str, Any]) -> Answer:
    answer = node.http.post("/v1/completions", json=body, timeout=ANSWER_S).raise_for_status().json()
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"]["tokens"]
