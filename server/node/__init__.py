"""What both nodes share: options, what a node is built from, the base of both nodes, how a process runs it, its ports and
its log.

Imports ``server.engine``, ``server.transfer`` and ``server.cache``; ``build`` and ``run`` wire up everything else.
"""
