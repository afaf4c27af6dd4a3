"""The prefill node: takes rooms from decode nodes, computes their prompts, pushes the state into their memory.

All of its requests are rooms, so there is one manager of them. On a decode node a request lives longer than its rooms:
there are two.

Imports ``server.node``, ``server.engine``, ``server.transfer`` and ``server.cache``; start reading at
``server.prefill.room_manager``.
"""
