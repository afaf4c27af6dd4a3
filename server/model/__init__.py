"""The DeepSeek-V4 network in plain torch: no sockets, no scheduling. Parameter names are the official checkpoint's.

Reads and writes the pools of ``server.cache``; imports nothing else of this project.
"""

import os

# MKL's sums then do not depend on where in memory a row begins. It reads this once, before its first product.
os.environ.setdefault("MKL_CBWR", "AUTO")
