"""What both nodes share: the parts and settings that they are built from, and what they say about themselves.

Imports ``server.engine``, ``server.transfer`` and ``server.cache``.
"""
