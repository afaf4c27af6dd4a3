"""The prefill node: takes rooms from decode nodes, computes their prompts, pushes the state into their memory.

Imports ``server.node``, ``server.engine``, ``server.transfer`` and ``server.cache``; ``server.prefill.node`` is the
place to start reading.
"""
