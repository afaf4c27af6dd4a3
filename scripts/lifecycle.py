#!/usr/bin/env python
"""Follows one request through a real pair and compares it with docs/lifecycle.md; see `walk/main.py`."""

import sys

from walk.main import main

if __name__ == "__main__":
    sys.exit(main())
