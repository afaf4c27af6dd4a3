"""Chat formats: from messages and tools to a prompt's text, and from an answer's text to reasoning, content and calls.

Knows what a tokenizer is and how a request fails, and nothing of HTTP; only :mod:`server.api` imports it.
"""
