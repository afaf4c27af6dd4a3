"""The tiny DeepSeek-V4 that the project tests and demonstrates with: its problems, tokenizer, training and measures.

Used by `scripts/train_tiny.py` only; nothing in `server/` imports it.
"""
