"""Whether dicts, lists and objects are still as they were: the structure, forwards and modes of a model's modules.

The check runs in every call of a converted model, over some thousand places in some hundred dicts. It is compiled
(csrc/watch.h), and looks at the places in a dict only when that dict was written; where kfconvert._C was not built for
this Python, the same is done here, much slower.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from enum import Enum
from types import CellType, FunctionType, GetSetDescriptorType
from typing import Any

from ...inputs import is_equal

try:
    from ..._C import first_change as _first_change
    from ..._C import gather as _gather
    from ..._C import watch_state as _watch_state

    COMPILED = True
except ImportError:  # kfconvert doctor tells why
    COMPILED = False


class Mark(Enum):
    """What stands in an entry for something that is no object in a dict."""

    MISSING = "in place of the object: the dict must not have the key"
    SIZE = "in place of the key: the dict must have so many items"
    ITEMS = "in place of the key: the list must hold the very objects of the tuple, the dict have these keys in order"
    TYPE = "in place of the key: the object must be of this very class"
    INSIDE = "in place of the key: the function must have this code, these defaults, and these values in its closure"
    DICT = "in place of the key: the object's __dict__ must be the one that it has at the first check"
    ROOT = "in place of the dict: the __dict__ that is given to the check"


MISSING, SIZE, ITEMS, TYPE, INSIDE, DICT, ROOT = Mark

_ABSENT = object()
# What first_change answers where a dict was written and all entries hold.
_WRITTEN = -1

# Marks that say something about the holder itself, and nothing about its __dict__.
_OF_OBJECTS = frozenset((ITEMS, TYPE, INSIDE))

# (dict, list, object, or ROOT; key, SIZE, ITEMS, TYPE, INSIDE or DICT; the object, MISSING, number of items, class,
# tuple, or None)
Entry = tuple[Any, Any, Any]


class Attributes:
    """In place of the dict in an entry: the ``__dict__`` of ``owner``, which is a dict itself."""

    __slots__ = ("owner",)

    def __init__(self, owner: Any):
        self.owner = owner


class Watch:
    """Tells whether any of ``entries`` no longer holds.

    An entry is (dict, key, object): the dict holds that very object under the key; (dict, key, MISSING): it does not
    have the key; (dict, SIZE, number): it has so many items; (list, ITEMS, tuple): it holds those very objects; (dict,
    ITEMS, tuple): its keys are these, in this order; (object, TYPE, class): it is of that very class; (function,
    INSIDE, tuple): see ``inside``; (object, DICT, None): it has not been given another ``__dict__`` since the first
    check. Instead of a dict an object may be given, for its ``__dict__``, which is looked up once (with ITEMS as
    ``Attributes``); use that for the attributes of a module, because a deep copy of a module has another ``__dict__``
    than the deep copy of ``module.__dict__``. ROOT stands for a ``__dict__`` that is given to each check, and which is
    not kept alive.

    A deep copy, made together with what the entries speak of, watches the copies.
    """

    __slots__ = ("_dicts", "_flat", "_order", "_state", "entries", "written")

    def __init__(self, entries: Iterable[Entry]):
        self.entries = tuple(entries)
        # Made at the first check: while a model is being copied or unpickled its modules have no attributes yet.
        self._flat: tuple[Any, ...] | None = None
        self._order: list[int] = []
        # Of the entries with DICT: index, object and its dict.
        self._dicts: list[tuple[int, Any, dict[str, Any]]] = []
        self._state: Any = None
        # Whether the last check found that a dict was written, even if all entries hold again. Only the compiled check
        # can tell, by the versions of dicts; a key that is set to the very object that it holds leaves the version as
        # it is.
        self.written = False

    def first_change(self, root: dict[str, Any] | None = None) -> int | None:
        """The index in ``entries`` of one that does not hold, None where all do.

        Raises:
            TypeError: an entry has a key that cannot be hashed, or a number of items that is no integer.
        """
        if self._flat is None:
            self._resolve()
        change = _first_change(self._flat, self._state, root, MISSING, SIZE, ITEMS, TYPE, INSIDE, DICT)
        if change is None:
            self.written = False
            return None
        self.written = True
        if change == _WRITTEN:
            return None
        if change == 0 and self._dicts:
            return next(index for index, holder, held in self._dicts if own_dict(holder) is not held)
        return self._order[change]

    def _resolve(self) -> None:
        """Entries of one dict or list side by side, in the order in which their holders come first; before these one
        entry for all the objects whose dict must stay."""
        by_holder: dict[int, list[tuple[int, Entry]]] = {}
        dicts = []
        for index, (holder, key, expected) in enumerate(self.entries):
            if key is DICT:
                dicts += [(index, holder, own_dict(holder))] if _takes_another_dict(type(holder)) else []
                continue
            resolved = _resolved(holder, key, expected)
            by_holder.setdefault(id(resolved[0]), []).append((index, resolved))
        found = [item for items in by_holder.values() for item in items]
        if dicts:
            _, holders, held = zip(*dicts)
            found.insert(0, (0, (holders, DICT, held)))
        self._order, self._dicts = [index for index, _ in found], dicts
        flat = tuple(part for _, entry in found for part in entry)
        self._state = _watch_state(flat)
        self._flat = flat

    def __reduce__(self):
        return Watch, (self.entries,)


def renewed(
    watch: Watch,
    changed: int | None,
    root: dict[str, Any] | None = None,
    is_same: Callable[[Any, Any], bool] = is_equal,
) -> tuple[Watch, int | None]:
    """``watch``, in which the entry at the index ``changed`` does not hold, made anew to expect the values of now
    wherever they are the same as the expected ones; and the index of an entry whose value is not, None where all
    entries hold then."""
    while changed is not None:
        holder, key, expected = watch.entries[changed]
        holder = root if holder is ROOT else holder
        if _same_as(holder, key, expected, is_same) is _ABSENT:
            return watch, changed
        entries = [(h, k, _same_as(root if h is ROOT else h, k, e, is_same, e)) for h, k, e in watch.entries]
        watch = Watch(entries)
        changed = watch.first_change(root)
    return watch, None


def _same_as(holder: Any, key: Any, expected: Any, is_same: Callable[[Any, Any], bool], default: Any = _ABSENT) -> Any:
    """What stands there now, where it is the same as ``expected``; else ``default``."""
    held: Any
    if key is ITEMS:
        holder = own_dict(holder.owner) if type(holder) is Attributes else holder
        held = tuple(dict.__iter__(holder) if isinstance(holder, dict) else holder)
    elif isinstance(key, Mark):
        return default
    else:
        held = dict.get(_dict_of(holder), key, MISSING)
    return held if held is expected or is_same(held, expected) else default


def flat_places(places: Iterable[tuple[Any, Any]]) -> tuple[Any, ...]:
    """``places`` (dict, object for its ``__dict__``, or ROOT; key) in the form that ``gather`` takes."""
    return tuple(part for holder, key in places for part in _resolved(holder, key, None)[:2])


def gather(places: tuple[Any, ...], root: dict[str, Any] | None = None) -> list[Any]:
    """What the dicts hold under the keys, for ``places`` from ``flat_places``; ``root`` is the dict of ROOT.

    Raises:
        KeyError: a dict does not have the key.
    """
    return _gather(places, root)


def _resolved(holder: Any, key: Any, expected: Any) -> Entry:
    if holder is ROOT:
        holder = None
    elif key not in _OF_OBJECTS or type(holder) is Attributes:
        holder = _dict_of(holder)
    return holder, _interned(key), expected


def _dict_of(holder: Any) -> dict[str, Any]:
    if isinstance(holder, dict):
        return holder
    return own_dict(holder.owner) if type(holder) is Attributes else vars(holder)


def own_dict(holder: Any) -> dict[str, Any]:
    """The attributes of an object, whatever its class makes of their names. Raises AttributeError where it has none."""
    found: dict[str, Any] = object.__getattribute__(holder, "__dict__")
    return found


def _takes_another_dict(kind: type) -> bool:
    """Whether the ``__dict__`` of objects of a class is the one that Python keeps for them, and may be assigned."""
    found = next((vars(each)["__dict__"] for each in kind.__mro__ if "__dict__" in vars(each)), None)
    return isinstance(found, GetSetDescriptorType)


def inside(function: FunctionType) -> tuple[Any, ...]:
    """What a function is made of besides its globals: code, defaults, those of keywords, and its closure's values; None
    for one that has not been assigned yet."""
    values = [_content(cell) for cell in function.__closure__ or ()]
    return (function.__code__, function.__defaults__, function.__kwdefaults__, *values)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _interned(key: Any) -> Any:
    return sys.intern(key) if type(key) is str else key


def first_change_in_python(
    entries: tuple[Any, ...],
    state: Any,
    root: Any,
    missing: Any,
    size: Any,
    items: Any,
    type_: Any,
    inside_: Any,
    dict_: Any,
) -> int | None:
    for start in range(0, len(entries), 3):
        holder, key, expected = entries[start : start + 3]
        holder = root if holder is None else holder
        if key is size:
            same = len(holder) == expected
        elif key is items:  # of a dict, its keys
            same = len(holder) == len(expected) and all(map(operator.is_, holder, expected))
        elif key is type_:
            same = type(holder) is expected
        elif key is inside_:
            found = inside(holder)
            same = len(found) == len(expected) and all(map(operator.is_, found, expected))
        elif key is dict_:
            same = all(own_dict(each) is held for each, held in zip(holder, expected))
        else:
            same = dict.get(holder, key, _ABSENT) is (_ABSENT if expected is missing else expected)
        if not same:
            return start // 3
    return None


def no_state(entries: tuple[Any, ...]) -> None:
    """Python code cannot read the versions of dicts."""


def gather_in_python(places: tuple[Any, ...], root: Any) -> list[Any]:
    return [(root if store is None else store)[key] for store, key in zip(places[::2], places[1::2])]


if not COMPILED:
    _first_change, _gather, _watch_state = first_change_in_python, gather_in_python, no_state
