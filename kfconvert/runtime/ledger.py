"""What a converted model tells about itself: its statistics, its counters of calls, and one warning of a miss."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from .compilers import Notice
from .cuda_graphs import CudaGraphs

if TYPE_CHECKING:
    from .guarded import GuardedForward


class MissWarning:
    """Misses are warned about once a model, whichever of its guarded forwards has missed first."""

    def __init__(self, model: nn.Module):
        self.model_name = type(model).__name__
        self.given = False
        self.compilers = Notice(self.model_name)

    def give(self, path: str, reason: str, stacklevel: int) -> None:
        if not self.given:
            self.given = True
            name = self.model_name + (f".{path}" if path else "")
            warnings.warn(
                f"kfconvert: {name} runs its original forward for this call: {reason}. "
                "Further misses are counted in model.kfconvert_info().",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )


class Ledger:
    """What a converted model answers about itself: its statistics, and the counters of its guarded forwards.

    ``guarded``: the guarded forward of each captured module by its path; "" is the model itself. ``graphs``: the CUDA
    graphs that they are run by.
    """

    def __init__(self, stats: dict[str, Any], warning: MissWarning, graphs: CudaGraphs):
        self.stats, self.warning, self.graphs = stats, warning, graphs
        self.guarded: dict[str, GuardedForward] = {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model does not contain a part that was taken out of it.
        return {**self.__dict__, "guarded": {path: g for path, g in self.guarded.items() if g.is_alive()}}

    def info(self) -> dict[str, Any]:
        """The conversion statistics and, under "guard", hits and misses by reason; under "parts" those of each
        submodule that was captured on its own; under "cuda_graphs" the recordings there are now; under "frozen" None
        or, once it was frozen, ``host_bytes``: the bytes of it that lie in host memory."""
        frozen = next((g.frozen for g in self.guarded.values()), None)
        counts = {path: {"hits": g.hits, "misses": dict(g.misses)} for path, g in self.guarded.items()}
        guard = counts.pop("", {"hits": 0, "misses": {}})
        return {
            **self.stats,
            "guard": guard,
            "parts": counts,
            "cuda_graphs": self.graphs.info(),
            "frozen": None if frozen is None else {"host_bytes": frozen.host_bytes},
        }

    def refresh(self) -> None:
        """Prepare everything derived from weights anew at the next call.

        Needed only after writes that leave no trace in a tensor, such as ``parameter.data.mul_(...)`` or those through
        ``parameter.detach().numpy()``, where ``check_weights`` does not find them soon enough; it happens by itself
        after calls in train mode, ``train()``, ``eval()`` and the steps of optimizers.
        """
        for guarded in self.guarded.values():
            guarded.refresh()

    def begin(self, check_weights: int) -> None:
        """Hand the model over: what the conversion itself has done does not count. After every ``check_weights`` calls
        the weights behind plans are compared with what they are now; 0 for never."""
        self.reset_counters()
        for guarded in self.guarded.values():
            guarded.begin(check_weights)

    def reset_counters(self) -> None:
        self.warning.given = False
        self.graphs.reset_counters()
        for guarded in self.guarded.values():
            guarded.reset_counters()
