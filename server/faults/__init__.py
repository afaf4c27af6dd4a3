"""Everything that goes wrong on purpose, so that every check can be seen to fire: ``--fault``.

A node calls :class:`~server.faults.hooks.Hooks`, which do nothing; with ``--fault`` it has
:class:`~server.faults.injection.Faults` in their place.
"""
