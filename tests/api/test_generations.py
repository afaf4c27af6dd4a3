"""The queue between the node's generations and one HTTP answer."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from server.api.generations import Generations
from server.engine.generation import NodeGeneration
from server.engine.request import Backend, FinishReason, GenerationRequest, TokenOutput
from server.failure import Failure, RequestFailed

A_TOKEN = TokenOutput((5,), "a")
LAST = TokenOutput((6,), "b", finish_reason=FinishReason.LENGTH)
FAILURE = RequestFailed(Failure("engine_error", "the room failed"))


class Node:
    """Generations that the test fills itself."""

    def __init__(self) -> None:
        self.running: list[NodeGeneration] = []

    def submit(self, _request: GenerationRequest) -> NodeGeneration:
        self.running.append(NodeGeneration(lambda: None))
        return self.running[-1]


def generations_of(node: Node, n: int) -> Generations:
    return Generations(cast(Backend, node), [GenerationRequest(str(i), (5, 6)) for i in range(n)])


def take_all(generations: Generations) -> list[Any]:
    taken = []
    while (item := generations.take()) is not None:
        taken.append(item)
    return taken


async def test_an_output_of_a_single_generation_is_read_in_the_call_that_brings_it() -> None:
    node, read = Node(), []
    generations = generations_of(node, 1)
    node.running[0].put(A_TOKEN)
    with generations.read_by(lambda: read.append(take_all(generations))):
        assert read == [[(0, A_TOKEN)]], "what was there before"
        node.running[0].put(LAST)
        assert read[1:] == [[(0, LAST)]]
        assert await generations.wait()
        assert generations.is_over


async def test_outputs_of_several_generations_that_come_together_are_read_together() -> None:
    node, read = Node(), []
    generations = generations_of(node, 3)
    with generations.read_by(lambda: read.append(take_all(generations))):
        for generation in node.running:
            generation.put(A_TOKEN)
        await asyncio.sleep(0)
    assert read == [[], [(0, A_TOKEN), (1, A_TOKEN), (2, A_TOKEN)]]


async def test_what_came_before_a_failure_is_taken_before_it_is_raised() -> None:
    node = Node()
    generations = generations_of(node, 2)
    node.running[0].put(A_TOKEN)
    node.running[1].fail(FAILURE)
    node.running[0].put(LAST)
    assert await generations.wait()
    assert take_all(generations) == [(0, A_TOKEN)]
    with pytest.raises(RequestFailed) as caught:
        await generations.wait()
    assert caught.value is FAILURE


async def test_a_failure_waits_for_a_reader_that_has_no_room() -> None:
    node, has_room = Node(), False
    generations = generations_of(node, 1)

    def read() -> None:
        if has_room:
            take_all(generations)

    with generations.read_by(read):
        node.running[0].put(A_TOKEN)
        node.running[0].fail(FAILURE)
        assert not await generations.wait(0.01) or generations.has_waiting
        has_room = True
        generations.read()
        with pytest.raises(RequestFailed):
            await generations.wait()


async def test_silence_ends_a_wait_that_is_limited() -> None:
    generations = generations_of(Node(), 1)
    assert not await generations.wait(0.0)
