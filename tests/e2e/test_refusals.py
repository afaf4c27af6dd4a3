"""Peers that do not fit each other are refused by the field's name, and the client reads it with both values."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.cache.live import LIVE_RULES
from server.engine.tokenizer import Tokenizer
from server.model.fingerprint import model_fingerprint
from server.model.interface import LoadedModel
from server.model.state import state_components
from tests.support.checkpoints import BUNDLED
from tests.support.http import http_server
from tests.support.pair import (
    SAME,
    Side,
    Specs,
    TestNode,
    a_request,
    answer,
    peers_of,
    registered,
    running_decode,
    running_pair,
    running_prefill,
    tokens,
)
from tests.support.waiting import until

COMPONENTS = tuple(name for name in LIVE_RULES if name != "draft_swa")
KNOWN_S = 10.0
"""A refusal is known, and answered, within this time; it takes a few round trips."""


def without(name: str) -> Callable[[Specs], Specs]:
    return lambda specs: tuple(spec for spec in specs if spec.name != name)


def changed(name: str, **fields: Any) -> Callable[[Specs], Specs]:
    return lambda specs: tuple(replace(spec, **fields) if spec.name == name else spec for spec in specs)


def with_draft_window(specs: Specs) -> Specs:
    (swa,) = (spec for spec in specs if spec.name == "swa")
    return (*specs[:-1], replace(swa, name="draft_swa", layer_ids=(4,)), specs[-1])


UNFIT = {
    "model": (Side(identity=replace(SAME, model="another-model")), Side(), "another-model", "model"),
    "tokenizer": (Side(identity=replace(SAME, tokenizer="other-words")), Side(), "other-words", "tokenizer"),
    "dtype": (Side(identity=replace(SAME, dtype="bfloat16")), Side(), "bfloat16", "float32"),
    "numerics": (Side(identity=replace(SAME, numerics="official")), Side(), "official", "plain"),
    "kernels": (Side(identity=replace(SAME, kernels="kernels-b")), Side(), "kernels-b", "kernels"),
    "page_size": (Side(page_size=128), Side(), "128", "256"),
    "components.swa.dtype": (Side(components=changed("swa", dtype="bfloat16")), Side(), "bfloat16", "float32"),
    "components.c4_kv.dtype": (Side(kv_dtype="fp8"), Side(), "fp8_kv", "float32"),
    "components.c4_index.dtype": (Side(index_dtype="mxfp4"), Side(index_dtype="fp8"), "mxfp4_index", "fp8_index"),
    "components.c4_kv.layer_ids": (Side(components=changed("c4_kv", layer_ids=(1,))), Side(), "(1,)", "(1, 3)"),
    "components.draft_swa": (Side(), Side(components=with_draft_window), "absent", "present"),
    **{f"components.{name}": (Side(components=without(name)), Side(), "absent", "present") for name in COMPONENTS},
}
"""By the field that is named: both sides, and what each of them says of it (prefill, decode)."""


def test_the_list_of_components_is_whole(model: LoadedModel) -> None:
    assert {spec.name for spec in state_components(model.config, "float32")} == set(COMPONENTS)


async def errors_of(node: TestNode, decode: Any) -> list[dict[str, Any]]:
    """What clients are told: a completion, a chat, a stream, and whoever asks for readiness."""
    completion: dict[str, Any] = {"prompt": [20, 30, 40], "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    async with http_server(decode, node.registry) as url, httpx.AsyncClient(base_url=url, timeout=10) as client:
        answers = await asyncio.gather(
            client.post("/v1/completions", json=completion),
            client.post("/v1/completions", json={**completion, "stream": True}),
            client.post("/v1/chat/completions", json=chat),
            client.get("/ready"),
        )
    assert [response.status_code for response in answers] == [503] * 4
    return [response.json()["error"] for response in answers]


@pytest.mark.parametrize("field", UNFIT)
async def test_a_prefill_node_that_does_not_fit_is_refused_by_name(
    model: LoadedModel, tokenizer: Tokenizer, field: str
) -> None:
    p_side, d_side, theirs, ours = UNFIT[field]
    started = time.monotonic()
    async with running_pair(model, tokenizer, p_side, d_side) as pair:
        (peer,) = peers_of(pair.decode)
        assert peer["state"] == "refused"
        address = f"127.0.0.1:{pair.prefill.bootstrap_port}"
        errors = await errors_of(pair.d, pair.decode)
        words = f"prefill {address} refused this decode node: {field} differs: prefill has {theirs}, decode has {ours}"
        assert all(words in error["message"] for error in errors)
        assert [error["code"] for error in errors] == ["no_prefill"] * 3 + ["not_ready"]
        assert time.monotonic() - started < KNOWN_S + 2.0  # the nodes' start and the HTTP server's end are in it
        assert pair.p.metric("pd_control_frames_dropped_total", reason="refused") >= 1, "the prefill node counts it too"
        assert pair.d.commands == pair.p.commands == [], "nobody computed anything"
        assert pair.p.all_free
        assert pair.d.all_free


async def test_a_refused_decode_node_does_not_disturb_one_that_fits(model: LoadedModel, tokenizer: Tokenizer) -> None:
    request = a_request(range(20, 220))
    async with running_decode(model, tokenizer, Side(), None) as (_, local):
        expected = tokens((await answer(local, request))[0])
    async with running_prefill(model, tokenizer, Side()) as (_, prefill):
        address = (f"127.0.0.1:{prefill.bootstrap_port}",)
        async with (
            running_decode(model, tokenizer, Side(page_size=128), address) as (_, unfit),
            running_decode(model, tokenizer, Side(permute_seed=2), address) as (_, fit),
        ):
            await registered(unfit)
            await registered(fit)
            outputs, route = await answer(fit, request)
            assert tokens(outputs) == expected
            assert route.prefill == address[0]
            assert peers_of(unfit)[0]["state"] == "refused"


async def test_without_any_prefill_node_nothing_is_computed_here(model: LoadedModel, tokenizer: Tokenizer) -> None:
    async with running_decode(model, tokenizer, Side(), ("127.0.0.1:1",)) as (node, decode):
        started = time.monotonic()
        await until(lambda: "nobody" in peers_of(decode)[0]["reason"], KNOWN_S, "it is known")
        errors = await errors_of(node, decode)
        assert time.monotonic() - started < KNOWN_S
        assert all("nobody listens at 127.0.0.1:1 (Connection refused)" in error["message"] for error in errors)
        assert node.commands == []


def test_fingerprints_tell_weights_and_config_apart(tmp_path: Path) -> None:
    """So that what is compared above stands for the real thing."""
    copy = shutil.copytree(BUNDLED, tmp_path / "copy")
    assert model_fingerprint(copy) == model_fingerprint(BUNDLED)
    weights = copy / "model.safetensors"
    image = bytearray(weights.read_bytes())
    image[-1] ^= 1
    weights.write_bytes(image)
    assert model_fingerprint(copy) != model_fingerprint(BUNDLED)
    shutil.copy(BUNDLED / "model.safetensors", weights)
    config = copy / "config.json"
    config.write_text(config.read_text().replace('"sliding_window": 64', '"sliding_window": 65'))
    assert model_fingerprint(copy) != model_fingerprint(BUNDLED)
