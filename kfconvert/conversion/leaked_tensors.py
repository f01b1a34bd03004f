"""Removes FakeTensors that traces leave in dicts and in cached functions, where later calls would fail on them."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..runtime import MISSING, OF_EXPORT, reached, whole_walk
from .attribute_state import own_attributes


class OutsideCaches:
    """The dicts and cached functions that the code of a model finds in the globals and in closures."""

    def __init__(self, model: nn.Module):
        walk = whole_walk(model)
        found = reached(list(walk.containers.values()))
        self._dicts = [(each, dict(dict.items(each))) for each in found if isinstance(each, dict)]
        self._cached = list(walk.cached.values())

    def remove_stand_ins(self) -> None:
        """Restore the previous values of entries with FakeTensors, remove new entries with FakeTensors, and clear
        function caches that contain some."""
        for held, before in self._dicts:
            remove_stand_ins(held, before)
        for function in self._cached:
            answers = [each for each in gc.get_referents(function) if each is not function.__wrapped__]
            if _are_of_trace(answers):
                function.cache_clear()


def remove_stand_ins(held: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Does the same in one dict, such as a module's attributes."""
    entries = own_attributes(dict(dict.items(held))).items()
    added = [(key, value) for key, value in entries if value is not dict.get(before, key, MISSING)]
    for key, value in added:
        if _are_of_trace([key, value]):
            if key in before:
                held[key] = before[key]
            else:
                del held[key]


def _are_of_trace(values: Iterable[Any]) -> bool:
    return any(isinstance(each, OF_EXPORT) for each in reached(list(values)))
