#!/usr/bin/env python
"""Few-shot gsm8k against any OpenAI-compatible endpoint; see `evaluation/gsm8k.py`."""

import sys

from evaluation.gsm8k import main

if __name__ == "__main__":
    sys.exit(main())
