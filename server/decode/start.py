"""Loads and serves a decode node whose options are checked and whose port is taken."""

from __future__ import annotations

import socket

from server.cache.specs import DRAFT
from server.decode.node import DecodeNode
from server.decode.options import DecodeOptions
from server.decode.settings import DecodeSettings
from server.node.build import build_resources
from server.node.checks import Keys
from server.node.serve import serve


async def load_and_serve(options: DecodeOptions, keys: Keys, peers: tuple[str, ...] | None, http: socket.socket) -> int:
    """The exit code of the process, as :func:`.serve` says it. ``peers`` are the prefill nodes; None: local prefill."""
    k, cold = options.spec_tokens, options.draft_state == "recompute"
    resources = build_resources(
        "decode", options, keys.guard, draft=k > 0, spec_tokens=k, reuses_prefixes=peers is not None
    )
    own = frozenset({DRAFT}) if cold else frozenset()
    settings = DecodeSettings(**vars(resources.settings), prefill=peers, own_components=own)
    node = DecodeNode(settings, resources.context)
    engine = resources.engine(node.on_engine_event, cold_draft=cold)
    return await serve(node, engine, options, http, api_key=keys.api_key)
