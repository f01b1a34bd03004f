"""Methods of classes that are others for as long as a thread runs a model for a conversion.

The instances keep their class meanwhile, so that code which asks for it (``type(x) is C``, ``__eq__`` of a dataclass)
goes the way that it goes otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

# Under this name a function that stands in the place of a method keeps what the class itself has there.
_OVER = "_kfconvert_stands_over"
_NOTHING = object()
_count = 0


@contextmanager
def method_over(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Within the block, the method ``name`` of ``owner`` is the function that ``make`` returns for the one that it has.
    All threads find it there; it has to do for them what the other does, and so has it to do after the block, for a
    thread that is within it then.

    Raises:
        TypeError: methods cannot be put into the class, such as one that is compiled.
    """
    global _count
    held = type.__getattribute__(owner, "__dict__")
    over, before = make(type.__getattribute__(owner, name)), held.get(name, _NOTHING)
    setattr(over, _OVER, before)
    _count += 1
    try:
        type.__setattr__(owner, name, over)  # whatever the metaclass would do
        try:
            yield
        finally:
            # Somebody may have put another there meanwhile, which may call this one.
            if held.get(name) is over:
                if before is _NOTHING:
                    type.__delattr__(owner, name)
                else:
                    type.__setattr__(owner, name, before)
    finally:
        _count -= 1


def methods_stand_over() -> bool:
    """Whether a block of ``method_over`` runs in any thread."""
    return _count > 0


def stood_over(value: Any, nothing: Any) -> Any:
    """What a class has itself in the place of a function that ``method_over`` has put there, ``nothing`` where it has
    none of its own; ``value`` for all else."""
    before = vars(value).get(_OVER, value) if isinstance(value, FunctionType) else value
    return nothing if before is _NOTHING else before
