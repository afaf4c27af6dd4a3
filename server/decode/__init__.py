"""The decode node: admits requests, has their prompts computed by a prefill node, proves what arrived, and decodes on.

Imports ``server.node``, ``server.engine``, ``server.transfer`` and ``server.cache``; start reading at
``server.decode.request_manager``.
"""
