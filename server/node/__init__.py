"""What both nodes share: options, what a node is built from, the base of both, how a process runs it, ports and logs.

Imports ``server.engine``, ``server.transfer`` and ``server.cache``; ``checks`` and ``run`` (which import no torch),
``build`` and ``serve`` wire up everything else.
"""
