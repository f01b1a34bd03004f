"""Guards in the form that compilers trace: what they ask, and what cannot be asked so."""

import pytest
import sympy
import torch
from torch.utils._sympy.functions import Mod

from kfconvert.region import Answer, Guard, SymbolicGuard, UntraceableGuard, is_comparable
from kfconvert.region.guard import TensorGuard

S0, S1 = sympy.symbols("s0 s1", integer=True, positive=True)
CPU = torch.device("cpu")


def guard(*sizes, constraints=(), constants=(), one=(), answers=(), tried=(), may_be_one=()):
    tensors = [TensorGuard(index, torch.float32, CPU, each) for index, each in enumerate(sizes)]
    ranges = {S0: (2, 8), S1: (2, None)}
    return Guard(
        tensors,
        list(constants),
        list(constraints),
        ranges,
        {},
        set(one),
        list(answers),
        {frozenset(), *map(frozenset, tried)},
        set(may_be_one),
    )


X = torch.zeros(4, 3)
LONG = Answer(S0 > 1, True, within=False)  # noqa: FBT003
EQUAL = Answer(sympy.Eq(S0, S1), False, within=False)  # noqa: FBT003
ADMITTED = {
    "as traced": (guard((S0, 3)), [X], True),
    "another fixed size": (guard((S0, 5)), [X], False),
    "too large": (guard((S0, 3)), [torch.zeros(9, 3)], False),
    "one": (guard((S0, 3)), [X[:1]], False),
    "one that is safe": (guard((S0, 3), one=[S0]), [X[:1]], True),
    "one, of which more was asked": (guard((S0, 3), one=[S0], answers=[LONG]), [X[:1]], False),
    "one, of which that was tried": (guard((S0, 3), one=[S0], answers=[LONG], tried=[[LONG]]), [X[:1]], True),
    "one beside another": (guard((S0, S1), one=[S0], answers=[EQUAL], tried=[[EQUAL]]), [X[:1, :1]], False),
    "none": (guard((S0, 3), one=[S0]), [X[:0]], False),
    "sizes that are equal": (guard((S0, 3), (S0,)), [X, torch.zeros(4)], True),
    "sizes that are not": (guard((S0, 3), (S0,)), [X, torch.zeros(5)], False),
    "a computed size": (guard((S0, 3), (2 * S0 + 1,)), [X, torch.zeros(9)], True),
    "a wrong computed size": (guard((S0, 3), (2 * S0 + 1,)), [X, torch.zeros(8)], False),
    "a constraint": (guard((S0, S1), constraints=[sympy.Eq(Mod(S0, 2), 0)]), [X], True),
    "a constraint that does not hold": (guard((S0, S1), constraints=[S0 <= S1]), [X], False),
    "another dtype": (guard((S0, 3)), [X.double()], False),
    "another rank": (guard((S0, 3)), [X[0]], False),
    "no tensor": (guard((S0, 3)), [3], False),
    "one tensor twice": (guard((S0, 3), (S0, 3)), [X, X], False),
    "one tensor twice, which is safe": (guard((S0, 3), (S0, 3), may_be_one=[(0, 0)]), [X, X], True),
    "a constant": (guard((S0, 3), constants=[(1, 2)]), [X, 2], True),
    "another constant": (guard((S0, 3), constants=[(1, 2)]), [X, 3], False),
    "a constant of another type": (guard((S0, 3), constants=[(1, 1)]), [X, True], False),
}


@pytest.mark.parametrize("what", ADMITTED)
def test_it_admits_what_the_guard_admits(what):
    plain, leaves, expected = ADMITTED[what]
    assert SymbolicGuard(plain).admits(leaves) is expected
    assert (plain.refusal(leaves) is None) is expected


@pytest.mark.parametrize(
    "plain",
    [
        guard((S0, S1), constraints=[sympy.Or(S0 < 3, S1 > 4)]),
        guard((S0, S1), constraints=[sympy.Max(S0, S1) < 9]),
        guard((S0, 3), constants=[(1, 0.0)]),
        guard((S0, 3), constants=[(1, object())]),
    ],
)
def test_what_cannot_be_asked_without_an_answer_that_binds_sizes_is_refused(plain):
    with pytest.raises(UntraceableGuard):
        SymbolicGuard(plain)


def test_zeros_have_two_signs():
    assert [is_comparable(value) for value in (0, 1.5, None, "a", 0.0, -0.0)] == [True] * 4 + [False] * 2
