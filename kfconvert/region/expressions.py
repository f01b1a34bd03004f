"""Expressions of free sizes as JSON values: ``s0 // 2 <= 8`` is ``["LessThan", ["FloorDiv", "s0", 2], 8]``.

No text is evaluated: expressions are rebuilt from the classes in a list.
"""

from __future__ import annotations

import re
from typing import Any

import sympy
from torch.utils._sympy import functions

from ..inputs import Unstorable

# Classes in expressions and conditions of sizes.
_CLASSES = {
    kind.__name__: kind
    for kind in (
        sympy.Add, sympy.Mul, sympy.Pow, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And,
        sympy.Or, sympy.Not, functions.FloorDiv, functions.Mod, functions.PythonMod, functions.CleanDiv, functions.Max,
        functions.Min,
    )
}  # fmt: skip
# PyTorch's names of sizes. They occur in functions generated from conditions.
_NAME = re.compile(r"s[0-9]{1,9}")


def stored_expression(expression: Any) -> Any:
    """Returns ``expression``, a number or a sympy expression, as JSON values. Raises Unstorable."""
    if isinstance(expression, (bool, sympy.logic.boolalg.BooleanAtom)):
        return bool(expression)
    if isinstance(expression, (int, sympy.Integer)):
        return int(expression)
    if isinstance(expression, sympy.Symbol) and _NAME.fullmatch(expression.name):
        return expression.name
    name = type(expression).__name__
    if _CLASSES.get(name) is not type(expression):
        raise Unstorable(f"a size is computed by {name[:50]}")
    return [name, *map(stored_expression, expression.args)]


def made_expression(stored: Any) -> Any:
    """Rebuilds the expression from the result of ``stored_expression``: an int or a sympy expression. Raises
    Unstorable, or errors of sympy."""
    if isinstance(stored, bool):
        return sympy.true if stored else sympy.false
    if isinstance(stored, int):
        return stored
    if isinstance(stored, str) and _NAME.fullmatch(stored):
        return sympy.Symbol(stored, positive=True, integer=True)
    if not isinstance(stored, list) or not stored or stored[0] not in _CLASSES:
        raise Unstorable(f"{str(stored)[:50]} is not an expression of sizes")
    return _CLASSES[stored[0]](*(sympy.sympify(made_expression(each)) for each in stored[1:]))
