"""The checks that need a GPU: each section in a process of its own, with its own time, and a table at the end.

``main`` runs the sections, ``section`` is one of them as a process. With ``--device cpu`` everything runs small and on
the CPU: a rehearsal, which says nothing about a GPU but shows that the tool works.
"""
