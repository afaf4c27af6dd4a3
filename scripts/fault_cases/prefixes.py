"""One node has lost its cache and the other has not, staged here. Each play returns what was seen."""

from __future__ import annotations

from cluster import Node
from cluster.asking import Question

from fault_cases.reports import Seen, staged
from fault_cases.stage import READY_S, Stage, expect, question

N_PREFIX = 512
"""Tokens: two pages."""
REUSED, HELD = "pd_prefix_reused_tokens_total", "pd_prefix_held_bytes_total"


@staged(
    ("p-restart",),
    happened="the prefill node restarts: its cache is gone, the decode node's is not",
    here="the decode node offers what it has; the prefill node computes the prompt and does not send what is the same",
)
async def prefill_restarts(stage: Stage) -> Seen:
    await _cached(stage, 51)
    stage.prefill.kill()
    await stage.restart_prefill()
    held = _total(stage.decode, HELD)
    await stage.right(_asked(51, 2))
    reused, held = _total(stage.prefill, REUSED), _total(stage.decode, HELD) - held
    expect(not reused, f"the prefill node takes {reused} tokens out of a cache that is gone")
    expect(held > 0, "the decode node holds nothing of what it has")
    return [f"the answer is right; nothing was reused, {held} bytes were held"]


@staged(
    ("d-restart",),
    happened="the decode node restarts: its cache is gone, the prefill node's is not",
    here="the decode node offers nothing; the prefill node computes on from its cache and sends everything",
)
async def decode_restarts(stage: Stage) -> Seen:
    await _cached(stage, 52)
    stage.decode.kill()
    stage.decode.start()
    await stage.nodes.serve(READY_S)
    reused = _total(stage.prefill, REUSED)
    await stage.right(_asked(52, 2))
    reused, held = _total(stage.prefill, REUSED) - reused, _total(stage.decode, HELD)
    expect(reused == N_PREFIX, f"the prefill node reuses {reused} of {N_PREFIX} tokens")
    expect(not held, f"{held} bytes were held by a node that has nothing")
    return [f"the answer is right; {reused} tokens were reused, nothing was held"]


async def _cached(stage: Stage, which: int) -> None:
    """A prefix that both nodes have, as a second request shows."""
    await stage.right(_asked(which, 0))
    reused, held = _total(stage.prefill, REUSED), _total(stage.decode, HELD)
    await stage.right(_asked(which, 1))
    expect(_total(stage.prefill, REUSED) == reused + N_PREFIX, "the prefill node has not kept the prefix")
    expect(_total(stage.decode, HELD) > held, "the decode node has not kept the prefix")


def _asked(which: int, suffix: int) -> Question:
    """One of the prompts with the prefix ``which``."""
    prefix, rest = question(N_PREFIX, which), question(20, 100 * which + suffix)
    return Question(rest.path, {**rest.body, "prompt": [*prefix.body["prompt"], *rest.body["prompt"]]})


def _total(node: Node, name: str) -> int:
    return int(sum(node.samples(name).values()))
