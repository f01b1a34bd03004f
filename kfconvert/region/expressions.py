"""Expressions of free sizes as JSON values: ``s0 // 2 <= 8`` is ``["LessThan", ["FloorDiv", "s0", 2], 8]``.

No text is evaluated: expressions are rebuilt from the classes in a list.
"""

from __future__ import annotations

import re
from typing import Any

import sympy
from torch.utils._sympy import functions

# Classes in expressions and conditions of sizes.
_CLASSES = {
    kind.__name__: kind
    for kind in (
        sympy.Add, sympy.Mul, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And, sympy.Or,
        sympy.Not, functions.FloorDiv, functions.Mod, functions.PythonMod, functions.CleanDiv, functions.Max,
        functions.Min,
    )
}  # fmt: skip
# PyTorch's names of sizes. They occur in functions generated from conditions, see ``SymbolicGuard``.
_NAME = re.compile(r"s[0-9]{1,9}")
_LARGEST = 2**62
# Only powers of free sizes, because a power of numbers may be arbitrarily large.
_POWER, _LARGEST_EXPONENT = "Pow", 8
# Maximum number of characters, because sympy is slow for larger expressions.
_LONGEST = 1000


class Unstorable(ValueError):
    """Raised if a value cannot be stored, or a stored value is invalid. The message has one line."""


def symbol(name: Any) -> sympy.Symbol:
    """Returns the free size ``name``. Raises Unstorable."""
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise Unstorable(f"{str(name)[:50]!r} is not a name of a size")
    return sympy.Symbol(name, positive=True, integer=True)


def stored_expression(expression: Any) -> Any:
    """Returns ``expression``, a number or a sympy expression, as JSON values. Raises Unstorable."""
    stored = _stored(expression)
    if made_expression(stored) != expression:
        raise Unstorable(f"the expression {str(expression)[:100]} cannot be rebuilt")
    return stored


def _stored(expression: Any) -> Any:
    if isinstance(expression, (bool, sympy.logic.boolalg.BooleanAtom)):
        return bool(expression)
    if isinstance(expression, (int, sympy.Integer)):
        return int(expression)
    if isinstance(expression, sympy.Symbol):
        return str(expression)
    name = type(expression).__name__
    if isinstance(expression, sympy.Pow):
        return [_POWER, *map(_stored, expression.args)]
    if _CLASSES.get(name) is not type(expression):
        raise Unstorable(f"a size is computed by {name[:50]}")
    return [name, *map(_stored, expression.args)]


def made_expression(stored: Any) -> Any:
    """Rebuilds the expression from the result of ``stored_expression``: an int or a sympy expression. Raises
    Unstorable."""
    if isinstance(stored, list) and len(repr(stored)) > _LONGEST:
        raise Unstorable("the expression of a size is too complex")
    return _made(stored)


def _made(stored: Any) -> Any:
    if isinstance(stored, bool):
        return sympy.true if stored else sympy.false
    if isinstance(stored, int):
        if abs(stored) > _LARGEST:
            raise Unstorable("a size is too large")
        return stored
    if isinstance(stored, str):
        return symbol(stored)
    if not isinstance(stored, list) or len(stored) < 2:
        raise Unstorable("a size is not an expression")
    if stored[0] == _POWER:
        return _power(*stored[1:]) if len(stored) == 3 else _power(None, None)
    kind = _CLASSES.get(stored[0]) if isinstance(stored[0], str) else None
    if kind is None:
        raise Unstorable(f"{str(stored[0])[:50]!r} is not an operation on sizes")
    terms = [sympy.sympify(_made(each)) for each in stored[1:]]
    try:
        return kind(*terms)
    except Exception as error:  # sympy raises many types, for example for divisions by zero
        raise Unstorable(f"a size is not an expression: {type(error).__name__}") from error


def _power(base: Any, exponent: Any) -> sympy.Pow:
    if type(exponent) is not int or not 2 <= exponent <= _LARGEST_EXPONENT:
        raise Unstorable("a size is a power that is not allowed")
    return symbol(base) ** exponent
