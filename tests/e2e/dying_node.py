"""``python dying_node.py ARGUMENT...``: a decode node whose engine thread dies of its second decoding step."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from unittest import mock

from server.decode.launch import main
from server.engine.runner import ModelRunner
from server.model.batch import Segment
from server.model.interface import ForwardOutput


class Bug(BaseException):
    """What the engine does not catch: the thread ends without a word."""


def dying(self: ModelRunner, segments: Sequence[Segment], *, every_row: bool = False, **options: bool) -> ForwardOutput:
    if every_row and next(steps) == 2:
        raise Bug("simulated")
    return forward(self, segments, every_row=every_row, **options)


forward, steps = ModelRunner.forward, itertools.count(1)
with mock.patch.object(ModelRunner, "forward", dying):
    sys.exit(main(sys.argv[1:]))
