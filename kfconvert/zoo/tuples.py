"""Tuples in a recipe: JSON has only lists, but a model's code may distinguish them, and a trace depends on both."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Mapping
from typing import Any

from .common import ZooError


def tuple_places(stored: Any, original: Any) -> list[list[str | int]]:
    """Returns the places of the lists in ``stored``, JSON values of ``original``, that are tuples in ``original``. A
    place is a list of keys and numbers of entries. Places in a tuple come before the tuple."""
    pairs: list[tuple[str | int, Any, Any]] = []
    if isinstance(stored, dict):
        held = original if isinstance(original, Mapping) else getattr(original, "__dict__", {})
        named = {str(key): value for key, value in held.items()}
        pairs = [(name, value, named[name]) for name, value in stored.items() if name in named]
    elif isinstance(stored, (list, tuple)) and isinstance(original, (list, tuple)):
        pairs = [(number, *pair) for number, pair in enumerate(zip(stored, original))]
    places = [[key, *place] for key, value, own in pairs for place in tuple_places(value, own)]
    is_tuple = isinstance(stored, (list, tuple)) and isinstance(original, tuple)
    return [*places, []] if is_tuple else places


def with_tuples(recipe: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of ``recipe`` with tuples in the places of its entry ``tuples``.

    Raises:
        ZooError: a place has no list.
    """
    recipe = copy.deepcopy(recipe)
    for place in recipe.get("tuples") or ():
        try:
            *path, last = place
            owner = functools.reduce(operator.getitem, path, recipe)
            if not isinstance(owner[last], list):
                raise TypeError
            owner[last] = tuple(owner[last])
        except (TypeError, ValueError, LookupError):
            raise ZooError(f"its recipe has no list in {str(place)[:100]}") from None
    return recipe
