"""What both nodes speak: messages, manifests, room keys and deadlines, connections, the copy plan and the transports.

Imports ``server.cache``. The rooms' state machines are in ``server.prefill`` and ``server.decode``.
"""
