"""Time per output token with draft tokens against plain decoding; see `benchmark/speculation.py`."""

import sys

from benchmark.speculation import main

if __name__ == "__main__":
    sys.exit(main())
