"""The statistics of a converted model, and its call counters."""

from __future__ import annotations

from typing import Any

from ..recording.cuda_graphs import CudaGraphs
from .notices import Notices


class Ledger:
    """The statistics of a converted model, and the counters of its guarded forwards.

    ``guarded``: the guarded forward of each captured module by its path; "" is the model itself. ``graphs``: their
    CUDA graphs.
    """

    def __init__(self, stats: dict[str, Any], notices: Notices, graphs: CudaGraphs):
        self.stats, self.notices, self.graphs = stats, notices, graphs
        self.guarded: dict[str, Any] = {}  # of GuardedForward
        # The ``generate`` of the instance, which counts its calls; None where the model uses its class's method.
        self.generate: Any = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model does not contain a part that was removed from it.
        return {**self.__dict__, "guarded": {path: g for path, g in self.guarded.items() if g.is_alive()}}

    def info(self) -> dict[str, Any]:
        """Return the conversion statistics. "guard" has hits, and misses by reason. "parts" has the same for each
        separately captured submodule. "switched_off" has the paths of submodules that now always run their original
        forward, as more calls had unsupported arguments than supported ones. "cuda_graphs" has the current recordings.
        "generate" is None, or the number of its calls that were decoded on a static cache, and the reasons of the
        others. "frozen" says whether ``kfconvert.freeze`` was called."""
        counts = {path: {"hits": g.hits, "misses": dict(g.misses)} for path, g in self.guarded.items()}
        guard = counts.pop("", {"hits": 0, "misses": {}})
        now = {
            "guard": guard,
            "parts": counts,
            "switched_off": [path for path, guarded in self.guarded.items() if guarded.is_off],
            "cuda_graphs": self.graphs.info(),
            "generate": None if self.generate is None else self.generate.info(),
            "frozen": any(guarded.frozen is not None for guarded in self.guarded.values()),
        }
        return type(self.stats)({**self.stats, **now})  # its class may have a display for notebooks

    def refresh(self) -> None:
        """Prepare all derived weights again, and drop programs that raise an error or differ from the original.

        Call it after a change that a converted model does not detect. Examples are writes that leave no trace in a
        weight (``parameter.data.mul_(...)``, ``parameter.detach().numpy()[:] = ...``), and changes of Python state that
        is fixed at conversion (globals that the forward reads). Calls in train mode, ``train()``, ``eval()`` and
        optimizer steps already cause derived weights to be prepared again.

        The method runs each program and the original forward once, on random inputs of the example's shapes.
        """
        for guarded in self.guarded.values():
            guarded.refresh()
        for guarded in self.guarded.values():
            guarded.drop_differing()

    def begin(self, check_weights: int) -> None:
        """Hand the model over: counters start at zero after the conversion. After every ``check_weights`` calls, the
        weights behind plans are compared with their current values; 0 for never."""
        self.reset_counters()
        for guarded in self.guarded.values():
            guarded.begin(check_weights)

    def reset_counters(self) -> None:
        self.notices.reset()
        self.graphs.reset_counters()
        if self.generate is not None:
            self.generate.reset_counters()
        for guarded in self.guarded.values():
            guarded.reset_counters()
