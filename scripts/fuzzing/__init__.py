"""scripts/fuzz.py: noise at every port of a pair, while a client keeps asking and every answer must stay right."""
