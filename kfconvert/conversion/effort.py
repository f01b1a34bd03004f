"""How much time a conversion may take, in one word."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_FOR_CAPTURES = 4.0
FORWARDS = 20


@dataclass(frozen=True)
class Effort:
    """What one word of ``effort`` stands for.

    Args:
        other_calls: whether captures are made for other calls than those like the example, and than those by which
            ``generate`` continues a prompt without padding: further forms in which token models are called, and parts
            of a model that could be captured as a whole.
        seconds: of processor time, for preparation, captures and selection together, besides ``FORWARDS`` forwards.
            Captures of the calls that ``generate`` makes do not count.
        timing: which share of the usual time a measurement may take.
        selection: seconds after which no further kind of site is measured; its sites are left as they were.
    """

    name: str
    other_calls: bool = True
    seconds: float = math.inf
    timing: float = 1.0
    selection: float = math.inf

    def for_captures(self, spent: float, forward: float) -> float:
        """The seconds of processor time that captures may take where preparation has taken ``spent`` and a forward
        takes ``forward``."""
        if self.seconds == math.inf:
            return math.inf
        return max(LEAST_FOR_CAPTURES, self.seconds + FORWARDS * forward - self.selection - spent)


EFFORTS = {
    effort.name: effort
    for effort in (Effort("fast", other_calls=False, seconds=15.0, timing=0.25, selection=3.0), Effort("full"))
}
