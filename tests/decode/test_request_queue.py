"""In which order requests get memory."""

from __future__ import annotations

from dataclasses import replace

from tests.nodes.support import NodeUnderTest, expected, pairs, request
from tests.support.waiting import until


def placed(d: NodeUnderTest) -> set[str]:
    """The requests that have memory."""
    return {req.request.request_id for req in d.node.manager.reqs.values() if req.placement is not None}


async def test_one_request_of_many_samples_takes_turns_with_the_others() -> None:
    async with pairs() as pair:
        d = await pair.decode(local=True)
        d.engine.gate.clear()
        n_slots = d.counts()["slots"]["free"]
        many = [replace(request(20, seed), request_id=f"many-{seed}", group="many") for seed in range(n_slots + 6)]
        running = [d.node.submit(one) for one in many]
        assert len(placed(d)) == n_slots, "what is free is taken"
        single = [replace(request(20, seed), request_id=f"single-{seed}") for seed in (90, 91)]
        running += [d.node.submit(one) for one in single]
        for i, names in enumerate(({"single-90"}, {"single-90", "single-91"})):
            running[i].abort()
            await until(lambda names=names: names <= placed(d), what="the single one is next")  # type: ignore[misc]
            assert len(placed(d)) == n_slots
        running[2].abort()
        await until(lambda: f"many-{n_slots}" in placed(d), what="then they go on, in their order")
        d.engine.gate.set()
        for one, generation in zip([*many, *single][3:], running[3:], strict=True):
            assert [token async for output in generation for token in output.token_ids] == expected(one)
