"""What each lost state component does; see `evaluation/knockout.py`."""

import sys

from evaluation.knockout import main

if __name__ == "__main__":
    sys.exit(main())
