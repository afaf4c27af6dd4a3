"""``python dying_node.py ARGUMENT...``: a decode node whose engine thread dies of its second decoding step."""

from __future__ import annotations

import itertools
import sys
from typing import Any

from server.decode.launch import main
from server.engine.runner import ModelRunner


class Bug(BaseException):
    """What the engine does not catch: the thread ends without a word."""


def dying(self: ModelRunner, *args: Any, every_row: bool = False) -> object:
    if every_row and next(steps) == 2:
        raise Bug("simulated")
    return forward(self, *args, every_row=every_row)


forward, steps = ModelRunner.forward, itertools.count(1)
ModelRunner.forward = dying
sys.exit(main(sys.argv[1:]))
