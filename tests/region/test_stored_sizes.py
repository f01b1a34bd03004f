"""Expressions of free sizes as JSON values."""

import json

import pytest
import sympy
from torch.utils._sympy import functions

from kfconvert.inputs import Unstorable
from kfconvert.region.expressions import made_expression, stored_expression

S, T = made_expression("s0"), made_expression("s71")


@pytest.mark.parametrize(
    "expression",
    [
        0, -3, S, S * T, S + 2 * T - 1, S**2, functions.FloorDiv(S, 2) <= 8, sympy.Ne(S, 1), functions.Mod(S, 4),
        sympy.Eq(functions.PythonMod(S, 2), 0), functions.Max(S, T, 3), functions.Min(S, 7), (S > 1) & (T < 3),
        sympy.Or(S > 1, T > 5), sympy.true, sympy.false,
    ],
    ids=str,
)  # fmt: skip
def test_an_expression_is_the_same_again(expression):
    found = made_expression(json.loads(json.dumps(stored_expression(expression))))
    assert found == expression and hash(found) == hash(expression)


@pytest.mark.parametrize("expression", [sympy.sqrt(S), sympy.Symbol("u0", integer=True), sympy.sin(S)], ids=str)
def test_others_are_not_stored(expression):
    with pytest.raises(Unstorable):
        stored_expression(expression)


@pytest.mark.parametrize(
    "stored",
    [None, 1.5, "x", "s0 + 1", "__import__('os')", [], ["Lambda", "s0", "s0"], ["Add", "s0", {"a": 1}]],
    ids=str,
)
def test_what_is_no_expression_is_refused(stored):
    with pytest.raises(Unstorable):
        made_expression(stored)
