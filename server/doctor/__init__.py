"""What a node needs of its machine, tried before it starts: ``--doctor`` of both launchers.

A library that does not load is what it is for. So nothing here imports torch or Mooncake but :mod:`.child`, which runs
in a process of its own; that a check hangs or crashes there is a finding like any other.
"""
