"""Products of parameters: a selection of each by default, all of it with ``pytest --exhaustive``."""

from itertools import combinations, product

import pytest

EXHAUSTIVE = False  # conftest.py sets it before pytest collects tests


def pairwise(**axes):
    """Parametrizes a test over the product of three or more ``axes``, or over a selection of it.

    The selection is the same in every run, and has each pair of values of any two axes.
    """
    values = [list(axis) for axis in axes.values()]
    chosen = product(*values) if EXHAUSTIVE else _covering(values)
    return pytest.mark.parametrize(list(axes), list(chosen))


def each_once(**axes):
    """Parametrizes a test over the product of ``axes``, or over a selection that has each value of each axis.

    The selection is as long as the longest axis; the values of the other axes repeat in turn.
    """
    values = [list(axis) for axis in axes.values()]
    in_turn = ([axis[row % len(axis)] for axis in values] for row in range(max(map(len, values))))
    return pytest.mark.parametrize(list(axes), list(product(*values) if EXHAUSTIVE else in_turn))


def exhaustive(*values):
    """``values`` of a parameter that only ``--exhaustive`` runs."""
    return [pytest.param(value, marks=pytest.mark.exhaustive) for value in values]


def _covering(axes):
    """Rows of the product of ``axes`` that have every pair; each is the one with the most pairs still missing."""
    rows = {row: _pairs(row) for row in product(*map(range, map(len, axes)))}
    missing = set().union(*rows.values())
    while missing:
        best = max(rows, key=lambda row: len(missing & rows[row]))
        missing -= rows[best]
        yield tuple(axis[index] for axis, index in zip(axes, best))


def _pairs(row):
    return set(combinations(enumerate(row), 2))
