"""Statistics are a dict like any other, which a notebook shows as the page of the report."""

import copy
import json
import pickle

import pytest
import torch
from support import small_models
from torch import nn

import kfconvert


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4), nn.ReLU()).eval()


@pytest.fixture(scope="module")
def converter():
    converter = kfconvert.ModelConverter(select="all")
    converter.convert_model(net(), example_inputs=torch.randn(2, 4))
    return converter


def test_statistics_are_shown_as_the_report(converter):
    html = converter.conversion_stats._repr_html_()
    assert "<h1>Sequential</h1>" in html and "linear_gelu" in html and "<html" not in html


@pytest.mark.filterwarnings("ignore")
def test_those_of_models_are_shown_as_well(tmp_path):
    fused = small_models.convert(net(), example_inputs=torch.randn(2, 4))
    loaded = kfconvert.load(kfconvert.save(fused, tmp_path / "fused"), model=net())
    nothing = kfconvert.auto_convert_model(nn.Identity(), example_inputs=torch.randn(2, 4))
    again = kfconvert.load(kfconvert.save(nothing, tmp_path / "nothing"), model=nn.Identity())
    for model in (fused, loaded, nothing, again, copy.deepcopy(fused)):
        assert "<h1>" in model.kfconvert_info()._repr_html_()


def test_they_are_a_dict_like_any_other(converter):
    stats = converter.conversion_stats
    plain = dict(stats)
    assert isinstance(stats, dict) and stats == plain and repr(stats) == repr(plain)
    assert json.dumps(stats) == json.dumps(plain)
    for copied in (copy.copy(stats), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert copied == stats and copied._repr_html_() == stats._repr_html_()
