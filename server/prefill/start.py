"""Loads and serves a prefill node whose options are checked and whose ports are taken."""

from __future__ import annotations

import socket

from server.model.checkpoint import has_draft
from server.node.build import build_resources
from server.node.checks import Keys
from server.node.serve import serve
from server.prefill.node import PrefillNode, PrefillSettings
from server.prefill.options import PrefillOptions
from server.transfer.manifest import TransportIdentity


async def load_and_serve(
    options: PrefillOptions,
    keys: Keys,
    http: socket.socket,
    bootstrap: socket.socket,
    transport: TransportIdentity | None,
) -> int:
    """The exit code of the process, as :func:`.serve` says it."""
    draft = has_draft(options.model) if options.draft is None else options.draft == "on"
    resources = build_resources("prefill", options, keys.guard, draft=draft)
    settings = PrefillSettings(
        **vars(resources.settings) | {"snapshot_every": options.snapshot_every},
        bootstrap_host=options.host,
        bootstrap_port=bootstrap.getsockname()[1],
        bootstrap_listener=bootstrap,
        transport=transport,
    )
    node = PrefillNode(settings, resources.context)
    return await serve(node, resources.engine(node.on_engine_event), options, http, api_key=keys.api_key)
