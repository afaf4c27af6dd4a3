"""One process's compute loop: requests, scheduling, sampling, tokenizer and text. Imports ``server.model`` and
``server.cache``.
"""
