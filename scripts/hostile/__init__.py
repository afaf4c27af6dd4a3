"""Whoever means a server no good: HTTP clients, decode nodes, noise on both ports. Each is drawn from a seed."""
