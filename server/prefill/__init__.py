"""The prefill node: takes rooms from decode nodes, computes their prompts and pushes the state into the decode nodes' memory.

Imports ``server.engine``, ``server.transfer`` and ``server.cache``; ``server.prefill.node`` is the place to start reading.
"""
