"""``python dying_node.py ARGUMENT...``: a decode node whose engine thread dies of its second decoding step."""

from __future__ import annotations

import itertools
import sys

from server.decode.launch import main
from server.engine.engine import Engine


class Bug(BaseException):
    """What the engine does not catch: the thread ends without a word."""


def dying(self: Engine, *args: object) -> None:
    if next(steps) == 2:
        raise Bug("simulated")
    decode(self, *args)


decode, steps = Engine._decode, itertools.count(1)
Engine._decode = dying
sys.exit(main(sys.argv[1:]))
