"""A two-process prefill/decode reference server for DeepSeek-V4.

``server.prefill`` computes prompts, ``server.decode`` answers; ``server.transfer`` moves the state between them and
``server.decode.verify`` proves that it arrived.
"""

__version__ = "0.1.0"
