"""``python -m server.decode`` is ``launch_decode``."""

import sys

from server.decode.launch import main

sys.exit(main())
