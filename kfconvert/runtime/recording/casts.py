"""Copies of weights in the dtype of autocast: cast once, and again after a change of the weight."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..state.derived import Derived
from ..state.watch import flat_places, gather

# The copies of each weight, by dtype, as far as a program holds them: the programs of a model share them.
_COPIES: Any = WeakIdKeyDictionary()


class _Copy:
    """A copy of a weight in another dtype. Its memory stays the same, so a program that shares it sees each write."""

    def __init__(self, source: Tensor, dtype: torch.dtype):
        with torch.inference_mode(False):
            self.tensor = torch.empty_like(source, dtype=dtype, requires_grad=False)
        self.derived = Derived()

    def current(self, source: Tensor) -> Tensor:
        """The copy of the current values."""
        values = self.derived.values([source])
        if not values:
            with torch.no_grad():
                self.tensor.copy_(source)
            values[None] = True
        return self.tensor


class Casts:
    """The copies that one program reads.

    Args:
        pairs: the place of each weight in the model, the place of its copy, and the dtype.
    """

    def __init__(self, pairs: Sequence[tuple[Any, Any, torch.dtype]]):
        self._pairs = list(pairs)
        self._current = Derived()
        self._held: list[_Copy] = []
        # The places of the weights in the form that gather() takes; created on first use, see __getstate__.
        self._flat: tuple[Any, ...] | None = None

    def sources(self, root: dict[str, Any]) -> list[Any]:
        """The weights. Raises KeyError where one was removed."""
        if self._flat is None:
            self._flat = flat_places([source for source, _, _ in self._pairs])
        return gather(self._flat, root)

    def refresh(self, root: dict[str, Any], fingerprinted: bool, admit: Callable[[Sequence[Any]], None]) -> None:
        """Casts the weights that have changed. The other arguments are those of ``Derived.values``."""
        sources = self.sources(root)
        if self._current.values(sources, fingerprinted=fingerprinted, admit=admit):
            return
        self._held = [_copy_of(source, dtype) for source, (_, _, dtype) in zip(sources, self._pairs)]
        for held, source, (_, (store, key), _) in zip(self._held, sources, self._pairs):
            store[key] = held.current(source)
        self._current.values(sources, fingerprinted=fingerprinted)[None] = True

    def note(self) -> None:
        """See ``Derived.note``."""
        self._current.note()

    def overwritten(self) -> bool:
        """See ``Derived.overwritten``."""
        return self._current.overwritten()

    def clear(self) -> None:
        """Cast all weights again in the next run."""
        self._current.clear()
        for held in self._held:
            held.derived.clear()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_flat": None, "_held": []}


def _copy_of(source: Tensor, dtype: torch.dtype) -> _Copy:
    known = _COPIES.setdefault(source, {})
    found = known[dtype]() if dtype in known else None
    if found is None or found.tensor.shape != source.shape or found.tensor.device != source.device:
        found = _Copy(source, dtype)
        known[dtype] = weakref.ref(found)
    return found
