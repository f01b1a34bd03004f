"""Checks whether dicts, lists and objects have changed: the structure, forwards and modes of a model's modules.

The check runs in every call of a converted model, over about a thousand places in about a hundred dicts. The compiled
check (csrc/watch.h) examines the places in a dict only after a write to that dict. Without kfconvert._C for this
Python, a much slower Python version runs.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

from ...inputs import is_equal

try:
    from ..._C import first_change as _first_change
    from ..._C import gather as _gather
    from ..._C import watch_state as _watch_state

    COMPILED = True
except ImportError:  # kfconvert doctor reports why
    COMPILED = False


class Mark(Enum):
    """A marker in an entry instead of an object in a dict."""

    MISSING = "in place of the object: the dict must not have the key"
    SIZE = "in place of the key: the dict must have so many items"
    ITEMS = "in place of the key: the list must hold the very objects of the tuple, the dict have these keys in order"
    TYPE = "in place of the key: the object must be of this very class"
    CODE = "in place of the key: the function must have this very code"
    ROOT = "in place of the dict: the __dict__ that is given to the check"


MISSING, SIZE, ITEMS, TYPE, CODE, ROOT = Mark

_ABSENT = object()
# The result of first_change where a dict was written and all entries hold.
_WRITTEN = -1

# Marks about the holder itself, not about its __dict__.
_OF_OBJECTS = frozenset((ITEMS, TYPE, CODE))

# (dict, list, object, or ROOT; key, SIZE, ITEMS, TYPE or CODE; the object, MISSING, number of items, class, tuple, or
# code)
Entry = tuple[Any, Any, Any]


class Watch:
    """Detects whether any of ``entries`` no longer holds.

    An entry is (dict, key, object): the dict holds that very object under the key; (dict, key, MISSING): it does not
    have the key; (dict, SIZE, number): it has so many items; (list, ITEMS, tuple): it holds those very objects; (dict,
    ITEMS, tuple): its keys are these, in this order; (object, TYPE, class): it is of that very class; (function, CODE,
    code): it has that code. An object may replace the dict, and stands for its ``__dict__``, which the first check
    looks up. Use it for module attributes: the deep copy of a module has another ``__dict__`` than the deep copy of
    ``module.__dict__``. ROOT stands for a ``__dict__`` that each check receives, and that is not kept alive.

    A deep copy that includes the objects of the entries watches the copies.
    """

    __slots__ = ("_flat", "_order", "_state", "entries", "written")

    def __init__(self, entries: Iterable[Entry]):
        self.entries = tuple(entries)
        # Created at the first check: during a copy or unpickling of a model, its modules have no attributes yet.
        self._flat: tuple[Any, ...] | None = None
        self._order: list[int] = []
        self._state: Any = None
        # Whether the last check found that a dict was written, even if all entries hold again. Only the compiled check
        # detects it, by dict versions; assigning the same object to a key does not change the version.
        self.written = False

    def first_change(self, root: dict[str, Any] | None = None) -> int | None:
        """Return the index in ``entries`` of one that does not hold, None where all do.

        Raises:
            TypeError: an entry has an unhashable key, or a number of items that is no integer.
        """
        if self._flat is None:
            self._resolve()
        change = _first_change(self._flat, self._state, root, MISSING, SIZE, ITEMS, TYPE, CODE)
        self.written = change is not None
        return None if change is None or change == _WRITTEN else self._order[change]

    def _resolve(self) -> None:
        """Group the entries by dict or list, in the order of their first holders."""
        by_holder: dict[int, list[tuple[int, Entry]]] = {}
        for index, entry in enumerate(self.entries):
            resolved = _resolved(*entry)
            by_holder.setdefault(id(resolved[0]), []).append((index, resolved))
        found = [item for items in by_holder.values() for item in items]
        self._order = [index for index, _ in found]
        flat = tuple(part for _, entry in found for part in entry)
        self._state = _watch_state(flat)
        self._flat = flat

    def __reduce__(self):
        return Watch, (self.entries,)


class Places:
    """Watched places, each with the reason for which a change of it matters.

    Args:
        is_same: called with the current and the expected value of a place. A value that is the same may replace
            another, and is watched from then on.
    """

    def __init__(self, found: Iterable[tuple[Entry, str]], is_same: Callable[[Any, Any], bool] = is_equal):
        entries, self.reasons = list[Entry](), list[str]()
        for entry, reason in found:
            entries.append(entry)
            self.reasons.append(reason)
        self.watch, self._is_same = Watch(entries), is_same

    def change(self, root: dict[str, Any] | None = None) -> str | None:
        """Return the reason of a place that does not hold, None where all do; ``root`` as for ``Watch``."""
        changed = self.watch.first_change(root)
        while changed is not None:
            if self._current(root, *self.watch.entries[changed]) is _ABSENT:
                return self.reasons[changed]
            found = ((entry, self._current(root, *entry)) for entry in self.watch.entries)
            self.watch = Watch(entry if held is _ABSENT else (*entry[:2], held) for entry, held in found)
            changed = self.watch.first_change(root)
        return None

    def _current(self, root: dict[str, Any] | None, holder: Any, key: Any, expected: Any) -> Any:
        """The current value of a place where it is the same as ``expected``."""
        held: Any = _ABSENT
        if key is ITEMS:
            held = tuple(dict.__iter__(holder) if isinstance(holder, dict) else holder)
        elif not isinstance(key, Mark):
            held = dict.get(root if holder is ROOT else _dict_of(holder), key, MISSING)  # type: ignore[arg-type]
        return held if held is not _ABSENT and (held is expected or self._is_same(held, expected)) else _ABSENT


def flat_places(places: Iterable[tuple[Any, Any]]) -> tuple[Any, ...]:
    """``places`` (dict, object for its ``__dict__``, or ROOT; key) in the form that ``gather`` takes."""
    return tuple(part for holder, key in places for part in _resolved(holder, key, None)[:2])


def gather(places: tuple[Any, ...], root: dict[str, Any] | None = None) -> list[Any]:
    """Return the values of ``places`` from ``flat_places``; ``root`` is the dict of ROOT.

    Raises:
        KeyError: a dict does not have the key.
    """
    return _gather(places, root)


def _resolved(holder: Any, key: Any, expected: Any) -> Entry:
    if holder is ROOT:
        holder = None
    elif key not in _OF_OBJECTS:
        holder = _dict_of(holder)
    return holder, sys.intern(key) if type(key) is str else key, expected


def _dict_of(holder: Any) -> dict[str, Any]:
    return holder if isinstance(holder, dict) else vars(holder)


def first_change_in_python(
    entries: tuple[Any, ...], state: Any, root: Any, missing: Any, size: Any, items: Any, type_: Any, code: Any
) -> int | None:
    for start in range(0, len(entries), 3):
        holder, key, expected = entries[start : start + 3]
        holder = root if holder is None else holder
        if key is size:
            same = len(holder) == expected
        elif key is items:  # the keys of a dict
            same = len(holder) == len(expected) and all(map(operator.is_, holder, expected))
        elif key is type_:
            same = type(holder) is expected
        elif key is code:
            same = holder.__code__ is expected
        else:
            same = dict.get(holder, key, _ABSENT) is (_ABSENT if expected is missing else expected)
        if not same:
            return start // 3
    return None


def no_state(entries: tuple[Any, ...]) -> None:
    """Return None: Python code cannot read the versions of dicts."""


def gather_in_python(places: tuple[Any, ...], root: Any) -> list[Any]:
    return [(root if store is None else store)[key] for store, key in zip(places[::2], places[1::2])]


if not COMPILED:
    _first_change, _gather, _watch_state = first_change_in_python, gather_in_python, no_state
