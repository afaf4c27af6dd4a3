"""The part of scripts/quickstart after the set-up (see demo/)."""

import sys

from demo.main import main

if __name__ == "__main__":
    sys.exit(main())
