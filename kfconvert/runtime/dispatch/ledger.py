"""What a converted model tells about itself: its statistics, its counters of calls, and whom it tells of misses."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from ..recording.cuda_graphs import CudaGraphs
from .compilers import Notice
from .miss_callback import MissCallback

if TYPE_CHECKING:
    from .guarded import GuardedForward

_LOG = logging.getLogger(__name__)


class MissNotices:
    """Who is told of misses, whichever of a model's guarded forwards has missed: one warning a model, the logger, and
    the user's own function. ``silent``: nobody is, as long as a conversion makes the calls."""

    def __init__(self, model: nn.Module):
        self.model_name = type(model).__name__
        self.silent = self._warned = False
        self.on_miss = MissCallback(None, self.model_name)
        self.compilers = Notice(self.model_name)

    def __getstate__(self) -> dict[str, Any]:
        """A copy, and what was pickled, tells of its own first miss."""
        return vars(self) | {"_warned": False}

    def reset(self) -> None:
        """As if nobody had been told of anything."""
        self.silent = self._warned = False

    def tell(self, path: str, reason: str, is_new: bool, is_expected: bool, stacklevel: int) -> None:
        """Tell of a miss of the module ``path``. ``is_new``: none of its calls has missed for this reason before;
        ``is_expected``: everybody expects it, as in train mode, so that nobody is warned."""
        if self.silent:
            return
        name = self.model_name + (f".{path}" if path else "")
        if is_new:
            _LOG.info("%s runs its original forward: %s", name, reason)
        if not (self._warned or is_expected):
            self._warned = True
            warnings.warn(
                f"kfconvert: {name} runs its original forward for this call: {reason}. "
                "Further misses are counted in model.kfconvert_info().",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )
        self.on_miss(reason, stacklevel + 1)


class Generates(Protocol):
    """What a ledger asks of the ``generate`` of a converted model."""

    def info(self) -> dict[str, Any]: ...

    def reset_counters(self) -> None: ...


class Ledger:
    """What a converted model answers about itself: its statistics, and the counters of its guarded forwards.

    ``guarded``: the guarded forward of each captured module by its path; "" is the model itself. ``graphs``: the CUDA
    graphs that they are run by.
    """

    def __init__(self, stats: dict[str, Any], notices: MissNotices, graphs: CudaGraphs):
        self.stats, self.notices, self.graphs = stats, notices, graphs
        self.guarded: dict[str, GuardedForward] = {}
        # What stands as ``generate`` in the model, and counts its calls; None where its class's own does.
        self.generate: Generates | None = None

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model does not contain a part that was taken out of it.
        return {**self.__dict__, "guarded": {path: g for path, g in self.guarded.items() if g.is_alive()}}

    def info(self) -> dict[str, Any]:
        """The conversion statistics and, under "guard", hits and misses by reason; under "parts" those of each
        submodule that was captured on its own; under "switched_off" the paths of those that run their original forward
        for good, as more calls had other arguments than they served; under "cuda_graphs" the recordings there are now;
        under "generate" None or how many of its calls were decoded on a static cache, and why
        others were not; under "frozen" None or, once it was frozen, ``host_bytes``: the bytes of it that lie in host
        memory."""
        frozen = next((g.frozen for g in self.guarded.values()), None)
        counts = {path: {"hits": g.hits, "misses": dict(g.misses)} for path, g in self.guarded.items()}
        guard = counts.pop("", {"hits": 0, "misses": {}})
        now = {
            "guard": guard,
            "parts": counts,
            "switched_off": [path for path, guarded in self.guarded.items() if guarded.is_off],
            "cuda_graphs": self.graphs.info(),
            "generate": None if self.generate is None else self.generate.info(),
            "frozen": None if frozen is None else {"host_bytes": frozen.host_bytes},
        }
        return type(self.stats)({**self.stats, **now})  # statistics may be of a class that notebooks show

    def refresh(self) -> None:
        """Prepare everything derived from weights anew, and drop programs whose outputs differ from the original's.

        Call it after a change that a converted model does not detect: weights written in ways that leave no trace in a
        tensor, such as ``parameter.data.mul_(...)`` or ``parameter.detach().numpy()[:] = ...``, and Python state that
        is fixed at conversion, such as globals that the forward reads. After calls in train mode, ``train()``,
        ``eval()`` and steps of optimizers, what is derived from weights is prepared anew without it.

        Each program is run once beside the original forward, on random inputs of the example's shapes.
        """
        for guarded in self.guarded.values():
            guarded.refresh()
        for guarded in self.guarded.values():
            guarded.drop_differing()

    def begin(self, check_weights: int) -> None:
        """Hand the model over: what the conversion itself has done does not count. After every ``check_weights`` calls
        the weights behind plans are compared with what they are now; 0 for never."""
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
