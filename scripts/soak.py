"""A chaos soak (see soaking/)."""

import sys

from soaking.main import main

if __name__ == "__main__":
    sys.exit(main())
