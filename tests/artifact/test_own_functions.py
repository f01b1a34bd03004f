"""Artifacts of models with fusions of a user's own: saved by the names of functions, which run only where trusted."""

import functools

import pytest
import torch
from support import own_functions as own
from support.artifacts import refusal, rewrite
from torch import nn

import kfconvert
from kfconvert import ArtifactError, ModelConverter, register_pattern, unregister_pattern
from kfconvert.artifact.record import read_record

X = torch.randn(3, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        return own.swish(self.layers[1](own.softcap(self.layers[0](x), 20.0)))


def register_swish():
    register_pattern(own.swish, own.swish_module, X, name="own_swish", numerics=1e-3)


@pytest.fixture(scope="module", autouse=True)
def patterns():
    register_swish()
    register_pattern(own.softcap, own.softcap_replacement, (X, 3.0), name="softcap", when=lambda match: True)
    yield
    for name in ("own_swish", "softcap"):
        unregister_pattern(name)


def converted(**options):
    return ModelConverter(select="all", effort="fast", **options).convert_model(Net().eval(), example_inputs=X)


@functools.cache
def with_swish():
    return converted(exclude=["softcap"])


@pytest.fixture
def saved(tmp_path):
    return with_swish(), kfconvert.save(with_swish(), tmp_path / "artifact")


def applied(model):
    return sorted(site["pattern"] for site in model.kfconvert_info()["sites"] if site["status"] == "applied")


def test_it_is_saved_by_the_names_of_its_functions(saved):
    (found,) = read_record(saved[1])["statistics"]["own_patterns"]
    assert found["name"] == "own_swish" and found["numerics"] == 1e-3
    assert found["reference"] == "support.own_functions:swish"
    assert found["replacement"] == "support.own_functions:swish_module"


def test_load_refuses_in_one_line_and_names_the_function(saved):
    with pytest.raises(ArtifactError) as caught:
        kfconvert.load(saved[1], model=Net)
    (line,) = str(caught.value).splitlines()
    assert "'own_swish' runs the function support.own_functions:swish_module" in line and "trust_source=True" in line


def test_a_trusted_artifact_repeats_the_decisions_and_needs_no_registration(saved):
    model, path = saved
    unregister_pattern("own_swish")
    try:
        again = kfconvert.load(path, model=Net, trust_source=True)
    finally:
        register_swish()
    assert applied(again) == applied(model) == ["linear", "linear", "own_swish"]
    with torch.no_grad():
        assert torch.equal(again(X), model(X))
    assert again.kfconvert_info()["guard"]["misses"] == {}
    kfconvert.save(again, path)
    assert applied(kfconvert.load(path, model=Net, trust_source=True)) == applied(model)


def test_patterns_that_are_registered_now_are_not_looked_for_in_a_model_that_is_loaded(tmp_path):
    path = kfconvert.save(converted(exclude=["softcap", "own_swish"]), tmp_path / "artifact")
    again = kfconvert.load(path, model=Net)
    assert applied(again) == ["linear", "linear"]
    assert "own_swish_found" not in list(again.kfconvert_info())
    assert ModelConverter(include=["own_swish"])  # they are registered as before


def test_functions_without_a_name_in_a_module_are_not_saved(tmp_path):
    with pytest.raises(ArtifactError, match="the when of the pattern 'softcap' has no importable name"):
        kfconvert.save(converted(), tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


DAMAGES = [
    ({"replacement": "support.own_functions:missing"}, "cannot be imported: AttributeError"),
    ({"replacement": "no.such.module:function"}, "cannot be imported: ModuleNotFoundError"),
    ({"replacement": "support.own_functions:torch.pi"}, "is not a function"),
    ({"reference": "../x:y"}, "cannot be imported: ImportError: it is not the name of a function"),
    ({"reference": "builtins:print"}, "'own_swish' takes any number of arguments"),
    ({"replacement": None}, "has no importable name"),
    ({"example": 3}, "are not arguments of a call"),
    ({"example": None}, "cannot be described"),
    ({"numerics": "any"}, "is damaged"),
]


@pytest.mark.parametrize(("change", "expected"), DAMAGES)
def test_what_does_not_fit_is_one_line(saved, change, expected):
    record = read_record(saved[1])
    record["statistics"]["own_patterns"][0].update(change)
    rewrite(saved[1], **record)
    assert expected in refusal(saved[1], model=Net, trust_source=True)
