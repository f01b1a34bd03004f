"""Second names: each is the object that the table says, importable from where it says."""

import importlib
import pickle
import subprocess
import sys

import pytest

import kfconvert
from kfconvert import kernels, ops, second_names

NAMES = [(module, name) for module, names in second_names.TABLE.items() for name in names]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_is_what_the_table_says(module, name):
    place = importlib.import_module(module)
    assert getattr(place, name) is second_names.found(second_names.TABLE[module][name])
    assert name in place.__all__


@pytest.mark.parametrize("module", second_names.TABLE)
def test_star_imports(module):
    if module == "kfconvert.kernels":
        pytest.importorskip("triton")  # one of its families
    found = {}
    exec(f"from {module} import *", found)
    assert set(second_names.TABLE[module]) <= set(found)


def test_nothing_is_a_second_name_twice_removed():
    """An entry points at what has the name itself, not at another second name."""
    for names in second_names.TABLE.values():
        for path in names.values():
            module, _, name = path.rpartition(".")
            assert name not in second_names.TABLE.get(module, {})


def test_no_operator_is_made_twice():
    named = {name: getattr(ops, name) for name in ops.__all__ if callable(getattr(ops, name))}
    first = {name for name, function in named.items() if function.__name__ == name}
    assert set(named) - first == set(second_names.TABLE["kfconvert.ops"])


def test_functions_are_pickled_by_their_name():
    for name in ("add_relu", "fused_bias_gelu", "layer_norm_relu"):
        assert pickle.loads(pickle.dumps(getattr(ops, name))) is getattr(ops, name)


def test_they_are_listed_without_an_import_of_torch():
    code = "import sys, kfconvert.second_names; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert "auto_convert" in kfconvert.__all__ and "elementwise" in dir(kernels)
