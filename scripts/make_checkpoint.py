#!/usr/bin/env python
"""A checkpoint in the official format without its weights: random, or made from a plain one; see
`checkpoint_making/main.py`.
"""

import sys

if __name__ == "__main__":
    from checkpoint_making.main import main

    sys.exit(main())
