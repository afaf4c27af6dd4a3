#!/usr/bin/env python
"""Memory of a node and bytes of a hand-off, on paper; see `planning/main.py`."""

import sys

if __name__ == "__main__":
    from planning.main import main

    sys.exit(main())
