"""Flat heterogeneous pools: what state a request has, where every byte of it lies, and which of it is live.

Knows bytes and positions; knows no network and no model mathematics. Imports only ``server.failure``.
"""
