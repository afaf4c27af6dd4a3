#!/usr/bin/env python
"""Prints where the time of one request went, as a timeline; see `timeline/main.py`."""

import sys

from timeline.main import main

if __name__ == "__main__":
    sys.exit(main())
