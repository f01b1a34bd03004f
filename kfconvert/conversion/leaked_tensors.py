"""Removes tensors that a conversion leaves in lists and dicts of globals, and in cached functions.

Later calls would fail on the FakeTensors of a trace.
"""

from __future__ import annotations

import collections
import gc
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ..runtime import MISSING, OF_EXPORT, reached, whole_walk


class OutsideCaches:
    """The lists, dicts and cached functions that the code of a model finds in the globals and in closures."""

    def __init__(self, model: nn.Module):
        walk = whole_walk(model)
        #: By the names of their globals.
        self.containers = dict(walk.containers)
        containers = list(self.containers.values())
        self._lists = [(each, list(each)) for each in containers if isinstance(each, (list, collections.deque))]
        self._dicts = [(each, dict(dict.items(each))) for each in reached(containers) if isinstance(each, dict)]
        self._cached = list(walk.cached.values())

    def restore(self) -> None:
        """Remove tensors that were added to lists, restore entries of dicts with FakeTensors, and clear function caches
        that contain some."""
        for held, before in self._lists:
            known = set(map(id, before))
            added = {id(item) for item in held if isinstance(item, Tensor) and id(item) not in known}
            if added:
                others = [item for item in held if id(item) not in known | added]
                held.clear()
                held.extend((*before, *others))
        for table, entries in self._dicts:
            for key, value in dict(dict.items(table)).items():
                if value is not dict.get(entries, key, MISSING) and _are_of_trace([key, value]):
                    if key in entries:
                        table[key] = entries[key]
                    else:
                        del table[key]
        for function in self._cached:
            answers = [each for each in gc.get_referents(function) if each is not function.__wrapped__]
            if _are_of_trace(answers):
                function.cache_clear()


def _are_of_trace(values: Iterable[Any]) -> bool:
    return any(isinstance(each, OF_EXPORT) for each in reached(list(values)))
