"""One process's compute loop: requests, scheduling, sampling, tokenizer and text. Imports ``server.model``,
``server.cache`` and of the kernels the sampler.
"""
