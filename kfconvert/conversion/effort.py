"""Time limits of a conversion, by the option ``effort``."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_FOR_CAPTURES = 4.0
FORWARDS = 20


@dataclass(frozen=True)
class Effort:
    """The limits for one value of ``effort``.

    Args:
        other_calls: whether to capture calls that differ from the example, and from the calls in which ``generate``
            continues a prompt without padding. These are further call forms of token models, and parts of a model that
            can be captured as a whole.
        seconds: processor time for preparation, captures and selection together, in addition to ``FORWARDS`` forwards.
            Captures of the calls that ``generate`` makes do not count.
        timing: share of the usual time for measurements.
        generates_kernels: whether TorchInductor compiles programs that no earlier conversion timed with its kernels,
            which takes up to a minute each, and Triton the strategy "triton".
        selection: seconds after which no further kind of site is measured; the remaining sites are not fused.
    """

    name: str
    other_calls: bool = True
    seconds: float = math.inf
    timing: float = 1.0
    generates_kernels: bool = False
    selection: float = math.inf

    def for_captures(self, spent: float, forward: float) -> float:
        """Returns the seconds of processor time for captures, if preparation took ``spent`` and a forward takes
        ``forward``."""
        if self.seconds == math.inf:
            return math.inf
        return max(LEAST_FOR_CAPTURES, self.seconds + FORWARDS * forward - self.selection - spent)


EFFORTS = {
    effort.name: effort
    for effort in (
        Effort("fast", other_calls=False, seconds=15.0, timing=0.25, selection=3.0),
        Effort("full", generates_kernels=True),
    )
}
