#!/usr/bin/env python
"""Speed in one run, by parts; see `benchmark/main.py`."""

import sys

from server.threads import limit_spinning

if __name__ == "__main__":
    limit_spinning()  # as in a node: before torch is imported
    from benchmark.main import main

    sys.exit(main())
