#!/usr/bin/env python
"""What this server does on a GPU, held against the CPU and timed; see `cuda_check/main.py`."""

import sys

from cuda_check.main import main

if __name__ == "__main__":
    sys.exit(main())
