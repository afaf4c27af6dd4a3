"""What both nodes share: the parts and settings that they are built from, their ports, their log, and what they say of
themselves.

Imports ``server.engine``, ``server.transfer`` and ``server.cache``.
"""
