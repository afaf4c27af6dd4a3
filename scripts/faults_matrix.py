"""Which check notices which lost state (see fault_cases/matrix.py)."""

import sys

from fault_cases.matrix import main

if __name__ == "__main__":
    sys.exit(main())
