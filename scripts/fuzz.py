"""Fuzzes a pair of its own (see fuzzing/)."""

import sys

from fuzzing.main import main

if __name__ == "__main__":
    sys.exit(main())
