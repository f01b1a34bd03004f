"""How much time a conversion may take, in one word."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Effort:
    """What one word of ``effort`` stands for.

    Args:
        other_calls: whether captures are made for other calls than those like the example, and than those by which
            ``generate`` continues a prompt without padding: further forms in which token models are called, and parts
            of a model that could be captured as a whole.
        timing: which share of the usual time a measurement may take.
        selection: seconds after which no further kind of site is measured; its sites are left as they were.
    """

    name: str
    other_calls: bool = True
    timing: float = 1.0
    selection: float = math.inf


EFFORTS = {
    effort.name: effort for effort in (Effort("fast", other_calls=False, timing=0.25, selection=4.0), Effort("full"))
}
