"""The CPU kernels: C++ in ``src``, built by ``build``, loaded by ``library``; the same mathematics as ``server.model``.

Imports nothing heavy by itself: the package's own build uses it before anything is installed.
"""
