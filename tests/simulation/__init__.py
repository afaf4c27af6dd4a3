"""Both nodes' room state machines under a virtual clock, by seed: a lossy network, failing engines and transports,
crashes.

:mod:`.world` is the clock, the network and the weather. :mod:`.decode` and :mod:`.prefill` drive the real state
machines, tombstones and allocators as the nodes do. :mod:`.memory` is what writes land in, where a fault would show.
"""
