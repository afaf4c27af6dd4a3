"""The tiny DeepSeek-V4 under `server/assets/tiny-dsv4`: training, measures, export; see `tiny/commands.py`."""

import os

# Set before torch starts its threads: waiting threads must not burn the cores they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tiny.commands import app

if __name__ == "__main__":
    app()
