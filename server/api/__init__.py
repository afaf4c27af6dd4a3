"""The OpenAI-compatible HTTP API: request schemas, routes, streaming, errors, health and metrics.

What it serves is a ``server.engine.request.Backend``, which ``server.node.serve`` hands to :func:`create_app`.
"""

from server.api.app import create_app

__all__ = ["create_app"]
