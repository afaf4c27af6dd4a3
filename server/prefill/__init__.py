"""The prefill node: takes rooms from decode nodes, computes their prompts, pushes the state into their memory.

Imports ``server.node``, ``server.engine``, ``server.transfer`` and ``server.cache``; start reading at
``server.prefill.room_manager``.
"""
