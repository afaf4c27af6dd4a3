"""Clients, false peers and noise that could harm a server. What each does is drawn from a seed."""
