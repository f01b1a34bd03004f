"""Whether dicts still hold the very objects that they held: the structure, forwards and modes of a model's modules.

The check runs in every call of a converted model, over about two thousand places in some hundred dicts. It is compiled
(csrc/watch.h), and where dicts have versions (CPython up to 3.12) looks at the places only when a dict was written;
where kfconvert._C was not built for this Python, the same is done here, much slower.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import Enum
from typing import Any

try:
    from ._C import dict_versions as _dict_versions
    from ._C import first_change as _first_change
    from ._C import gather as _gather
    from ._C import has_versions as _has_versions

    COMPILED = True
except ImportError:  # kfconvert doctor tells why
    COMPILED = False


class Mark(Enum):
    """What stands in an entry for something that is no object in a dict."""

    MISSING = "in place of the object: the dict must not have the key"
    SIZE = "in place of the key: the dict must have so many items"


MISSING, SIZE = Mark.MISSING, Mark.SIZE

_ABSENT = object()

# (dict, or object that stands for its __dict__; key or SIZE; the object, MISSING, or the number of items)
Entry = tuple[Any, Any, Any]


class Watch:
    """Tells whether any of ``entries`` no longer holds.

    An entry is (dict, key, object): the dict holds that very object under the key; (dict, key, MISSING): it does not
    have the key; or (dict, SIZE, number): it has so many items. Instead of a dict an object may be given, for its
    ``__dict__``; use that for the attributes of a module, because a deep copy of a module has another ``__dict__`` than
    the deep copy of ``module.__dict__``.

    A deep copy, made together with what the entries speak of, watches the copies.
    """

    __slots__ = ("_dicts", "_flat", "_versions", "entries")

    def __init__(self, entries: Iterable[Entry]):
        self.entries = tuple(entries)
        # Made at the first check: while a model is being copied or unpickled its modules have no attributes yet.
        self._flat: tuple[Any, ...] | None = None
        self._dicts: tuple[dict, ...] = ()
        self._versions: bytes | None = None

    def first_change(self) -> int | None:
        """The index in ``entries`` of the first that does not hold, None where all do.

        Raises:
            TypeError: an entry has a key that cannot be hashed, or a number of items that is no integer.
        """
        # Nothing was written to any of the dicts since all entries held.
        if self._versions is not None and _has_versions(self._dicts, self._versions):
            return None
        if self._flat is None:
            self._flat = tuple(part for entry in self.entries for part in _resolved(*entry))
            self._dicts = tuple({id(store): store for store in self._flat[::3]}.values())
        versions = _dict_versions(self._dicts)
        change = _first_change(self._flat, MISSING, SIZE)
        self._versions = versions if change is None else None
        return change

    def __reduce__(self):
        return Watch, (self.entries,)


def flat_places(places: Iterable[tuple[dict, Any]]) -> tuple[Any, ...]:
    """``places`` (dict, key) in the form that ``gather`` takes: (dict, key, dict, key, ...)."""
    return tuple(part for store, key in places for part in (store, _interned(key)))


def gather(places: tuple[Any, ...]) -> list[Any]:
    """What the dicts hold under the keys, for ``places`` from ``flat_places``.

    Raises:
        KeyError: a dict does not have the key.
    """
    return _gather(places)


def _resolved(holder: Any, key: Any, expected: Any) -> Entry:
    return holder if isinstance(holder, dict) else vars(holder), _interned(key), expected


def _interned(key: Any) -> Any:
    return sys.intern(key) if type(key) is str else key


def first_change_in_python(entries: tuple[Any, ...], missing: Any, size: Any) -> int | None:
    for start in range(0, len(entries), 3):
        store, key, expected = entries[start : start + 3]
        if key is size:
            same = len(store) == expected
        else:
            same = store.get(key, _ABSENT) is (_ABSENT if expected is missing else expected)
        if not same:
            return start // 3
    return None


def no_versions(dicts: tuple[dict, ...]) -> None:
    """Python code cannot read the versions of dicts."""


def gather_in_python(places: tuple[Any, ...]) -> list[Any]:
    return [store[key] for store, key in zip(places[::2], places[1::2])]


if not COMPILED:
    _first_change, _gather, _dict_versions = first_change_in_python, gather_in_python, no_versions
