"""The PD protocol: messages, manifests, connections, the rooms' state machines, the copy plan and the transports.

Imports ``server.cache`` only. The nodes in ``server.prefill`` and ``server.decode`` put the parts together.
"""
