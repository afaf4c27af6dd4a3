"""Faults that PD servers had elsewhere, staged here (see fault_cases/)."""

import sys

from fault_cases.main import main

if __name__ == "__main__":
    sys.exit(main())
