"""``python -m server.prefill`` is ``launch_prefill``."""

import sys

from server.prefill.launch import main

sys.exit(main())
