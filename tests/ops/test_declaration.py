"""What is declared beside the operators, and the lists that follow from it."""

import importlib
import types
from pathlib import Path

import pytest
from support.operator_samples import SAMPLES

from kfconvert import ops
from kfconvert.kernels import compiled
from kfconvert.ops.declaration import OPERATORS, declare

ROOT = Path(__file__).parents[2]


def test_every_public_function_is_declared_once():
    functions = {name for name in ops.__all__ if isinstance(getattr(ops, name), types.FunctionType)}
    assert {getattr(ops, name).__name__ for name in functions} == OPERATORS.keys()


def test_families_follow():
    assert set(compiled.NAMES) == {name for name, operator in OPERATORS.items() if operator.is_compiled}


def test_every_operator_has_samples():
    assert SAMPLES.keys() == {name for name, each in OPERATORS.items() if each.example} - {"apply_activation"}


def test_the_list_in_the_pages(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    table = importlib.import_module("list_operators").table()
    assert table in (ROOT / "docs" / "operators.md").read_text(), "run PYTHONPATH=. python scripts/list_operators.py"


def test_an_unknown_group():
    with pytest.raises(ValueError, match="group must be one of"):
        declare(group="others")
