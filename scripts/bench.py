#!/usr/bin/env python
"""Speed in one run, by parts; see `benchmark/main.py`."""

import sys

from benchmark.main import main

if __name__ == "__main__":
    sys.exit(main())
