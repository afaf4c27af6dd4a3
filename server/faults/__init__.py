"""Everything that goes wrong on purpose, so that every check can be seen to fire: ``--fault``.

Off by default. Imported by the hook points only.
"""
