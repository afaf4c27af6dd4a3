"""scripts/soak.py: random clients against nodes that are killed, frozen, restarted and attacked meanwhile."""
