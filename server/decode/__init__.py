"""The decode node: admits requests, has their prompts computed by a prefill node, proves what arrived, and decodes on.

A request lives from the client's call to its last token, through one room or, after a failure, two: the request manager
has its memory, the engine and the client, the room manager what is between ``Reserve`` and the commit.

Imports ``server.node``, ``server.engine``, ``server.transfer`` and ``server.cache``; start reading at
``server.decode.request_manager``.
"""
