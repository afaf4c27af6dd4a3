"""What both nodes share: options, what a node is built from, the base of both, how a process runs it, ports and logs.

Imports ``server.engine``, ``server.transfer`` and ``server.cache``; ``build`` and ``run`` wire up everything else.
"""
