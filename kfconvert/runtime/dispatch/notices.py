"""Reports of a converted model's fallbacks: one warning, the logger, and the user's callback."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

_LOG = logging.getLogger(__name__)
# Receives the reason of a miss, as ``kfconvert_info()`` counts it.
OnMiss = Callable[[str], Any]


class Notices:
    """Reports the misses of all guarded forwards of a model, and its compilations.

    A copy or an unpickled model warns of its first miss again. Copies use the same ``on_miss``; pickles drop it, as
    most functions cannot be pickled.

    Args:
        model_name: the name in reports.
        on_miss: called with the reason of each miss, before the original forward runs.
    """

    def __init__(self, model_name: str, on_miss: OnMiss | None = None):
        self.model_name, self.on_miss = model_name, on_miss
        #: Disables all reports of misses while a conversion makes the calls.
        self.silent = False
        self._warned = self._warned_of_compiler = False

    def reset(self) -> None:
        """Forget all earlier reports of misses."""
        self.silent = self._warned = False

    def missed(self, path: str, reason: str, is_new: bool, is_expected: bool, stacklevel: int) -> None:
        """Report a miss of the module ``path``. ``is_new``: the first miss of the module with this reason;
        ``is_expected``: an expected miss, as in train mode, which causes no warning."""
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
        if self.on_miss is not None:
            self.on_miss(reason)

    def compiled(self) -> None:
        """Warn that a compiler gets the original forward."""
        if not self._warned_of_compiler:
            self._warned_of_compiler = True
            warnings.warn(
                "kfconvert: torch.compile, torch.export and torch.jit.trace get the original forward of "
                f"{self.model_name}, without its fusions. To run the fusions, call the converted model uncompiled; "
                "kfconvert.export writes a program with the fused operators.",
                RuntimeWarning,
                stacklevel=2,
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Notices:
        return Notices(self.model_name, self.on_miss)

    def __reduce__(self) -> tuple[Any, ...]:
        return Notices, (self.model_name,)
