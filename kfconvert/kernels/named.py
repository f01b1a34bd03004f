"""Functions of kfconvert.ops with other implementations of the functions that they call."""

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType

from .. import ops


def over(others: Mapping[str, Callable], *names: str) -> dict[str, Callable]:
    """Returns the functions ``names`` of kfconvert.ops, which call ``others`` in place of their own of these names."""
    return {name: rebound(inspect.unwrap(getattr(ops, name)), others) for name in names}


def rebound(function: Callable, others: Mapping[str, Callable]) -> Callable:
    """Returns ``function`` with ``others`` in place of globals of its module. A call of itself is one of the result."""
    assert isinstance(function, FunctionType)
    values = {**function.__globals__, **others}
    own = FunctionType(function.__code__, values, function.__name__, function.__defaults__)
    for name in ("__annotations__", "__doc__", "__kwdefaults__"):
        setattr(own, name, getattr(function, name))
    values[function.__name__] = own
    return own
