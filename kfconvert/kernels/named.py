"""The named functions of kfconvert.ops, such as ``layer_norm_relu``, over other implementations of the general ones."""

import inspect
from collections.abc import Callable
from types import FunctionType

from .. import ops


def over(general: dict[str, Callable], *names: str) -> dict[str, Callable]:
    """Returns the functions ``names`` of kfconvert.ops by name, which call ``general`` in place of the operators."""
    return {name: _over(general, inspect.unwrap(getattr(ops, name))) for name in names}


def _over(general, function):
    values = {**function.__globals__, **general}
    own = FunctionType(function.__code__, values, function.__name__, function.__defaults__)
    own.__annotations__, own.__doc__ = function.__annotations__, function.__doc__
    return own
