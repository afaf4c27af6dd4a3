"""The OpenAI-compatible HTTP API: request schemas, routes, streaming, errors, health and metrics.

Knows of the engine only ``server.engine.request``; what it serves is a ``Backend`` that the launchers hand to
:func:`create_app`.
"""

from server.api.app import create_app

__all__ = ["create_app"]
