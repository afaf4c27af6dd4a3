"""Nodes whose answers are compared with those of one process that computes alone: the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from cluster.asking import Outcome, Question, ask
from cluster.node import START_S, ClusterFailed, Node
from cluster.nodes import Cluster
from cluster.relay import ControlRelay, control_relay
from cluster.wait import nothing_left

STOP_S, DRAIN_S = 60.0, 5.0
ORACLE_TIMEOUT_S = 300.0


class OracleCluster(Cluster):
    """A decode node with its prefill nodes, and the ``oracle``. ``silent`` are peers of it that never answer.

    ``relays`` are between the decode node and each prefill node, where messages are to come late.
    """

    def __init__(
        self,
        prefills: Sequence[Node],
        decode: Node,
        oracle: Node,
        relays: Sequence[ControlRelay] = (),
        silent: Collection[str] = (),
    ) -> None:
        super().__init__([*prefills, decode, oracle])
        self.prefills, self.decode, self.oracle = tuple(prefills), decode, oracle
        self.subjects = (*self.prefills, decode)
        self.relays, self._silent = relays, silent

    def node(self, name: str) -> Node:
        return next(node for node in self.subjects if node.name == name)

    def relay(self, name: str) -> ControlRelay:
        return self.relays[[node.name for node in self.prefills].index(name)]

    def held(self) -> list[str]:
        """What the nodes hold for requests; the oracle may be busy."""
        return [what for node in self.subjects for what in node.held()]

    def not_ready(self) -> list[str]:
        """Why the nodes do not serve, in words."""
        left = [f"{node.name}: not healthy" for node in self.prefills if not node.is_ok("/health")]
        left += [
            f"{peer['address']} is {peer['state']}: {peer['reason']}"
            for peer in self.decode.info()["peers"]
            if peer["state"] != "registered" and peer["address"] not in self._silent
        ]
        ready = self.decode.http.get("/ready")
        return left if ready.is_success else [*left, f"decode: {ready.text}"]

    async def serve(self, timeout_s: float = START_S) -> None:
        """Waits until the nodes serve, and the oracle. Raises :class:`ClusterFailed` if that does not come."""
        await asyncio.to_thread(self.oracle.wait_for, "/health", timeout_s)
        left, _ = await nothing_left(self.not_ready, timeout_s)
        if left:
            raise ClusterFailed(f"the nodes do not serve after {timeout_s:g} s: {'; '.join(left)}")

    async def right_answer(self, question: Question) -> Outcome:
        """What the oracle answers. Raises :class:`ClusterFailed` if it has another status than the question's."""
        outcome = await ask(self.oracle.url, question, timeout_s=ORACLE_TIMEOUT_S)
        if outcome.status != question.status:
            raise ClusterFailed(f"the process that computes alone said {outcome} to {question.shown}")
        return outcome

    def stop(self, timeout_s: float | None = STOP_S, drain_s: float | None = DRAIN_S) -> None:
        super().stop(timeout_s, drain_s)


@asynccontextmanager
async def oracle_cluster(
    seed: int,
    n_prefills: int,
    logs: Path,
    prefill_options: Sequence[str] = (),
    decode_options: Sequence[str] = (),
    *,
    relayed: bool = False,
    silent: Sequence[str] = (),
) -> AsyncIterator[OracleCluster]:
    """Everything, started and not awaited; ended on every way out.

    ``seed`` shuffles the pages and slots that the nodes hand out. ``relayed``: with relays between them.
    """
    common = ["--poison", "--slots", "4", "--pages", "64", "--permute-ids"]
    prefills = [
        Node(
            "prefill",
            logs / f"prefill{i}.log",
            *("--chunk-tokens", "64", *common, str(seed + i), *prefill_options),
            name=f"prefill{i}",
            faulty=True,
        )
        for i in range(n_prefills)
    ]
    async with AsyncExitStack() as stack:
        relays = [await stack.enter_async_context(control_relay(node.address)) for node in prefills if relayed]
        peers = [*([relay.address for relay in relays] or [node.address for node in prefills]), *silent]
        options = [word for address in peers for word in ("--prefill", address)]
        options += ["--spec-tokens", "3", *common, str(seed + n_prefills), *decode_options]
        decode = Node("decode", logs / "decode.log", *options, faulty=True)
        oracle = Node("decode", logs / "oracle.log", "--local-prefill", name="oracle")
        yield await stack.enter_async_context(OracleCluster(prefills, decode, oracle, relays, silent).started())
