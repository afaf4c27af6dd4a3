"""Which kind of draft a checkpoint carries, by the names of its tensors. It imports no torch."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable


class Draft(enum.StrEnum):
    """What the ``mtp.*`` tensors of a checkpoint make up. This server runs :attr:`NEXTN`."""

    NONE = "none"
    NEXTN = "nextn"
    DSPARK = "dspark"
    OTHER = "other"


def draft_of(keys: Iterable[str]) -> Draft:
    """The kind of draft that tensors of these names make up. The config's ``num_nextn_predict_layers`` does not tell:
    it is 1 in releases with DSpark, too.
    """
    own = {key for key in keys if key.startswith("mtp.")}
    if not own:
        return Draft.NONE
    if any(re.match(r"mtp\.\d+\.main_proj\.", key) for key in own):
        return Draft.DSPARK
    if "mtp.0.e_proj.weight" in own and all(key.startswith("mtp.0.") for key in own):
        return Draft.NEXTN
    return Draft.OTHER
