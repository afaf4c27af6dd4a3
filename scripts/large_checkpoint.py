#!/usr/bin/env python
"""Serves a checkpoint that is larger than the memory which its nodes may take; see `large_checkpoint/main.py`."""

import sys

if __name__ == "__main__":
    from large_checkpoint.main import main

    sys.exit(main())
