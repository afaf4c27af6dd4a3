"""The way of one request through both processes: recorded as it runs, and held against docs/lifecycle.md.

:mod:`.recorder` runs a node and notes its function calls, :mod:`.page` reads the document, :mod:`.way` compares and
counts.
"""
