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


def test_patterns_that_were_not_found_are_counted_as_0_and_take_no_room(converter):
    stats = converter.conversion_stats
    assert stats["linear_gelu_found"] == stats["linear_gelu_replaced"] == 1
    assert stats["attention_replaced"] == stats.get("attention_found") == stats.get("attention_found", 7) == 0
    assert {key for key in stats if key.endswith("_found")} == {"linear_gelu_found", "linear_relu_found", "total_found"}
    assert "attention_found" in stats and "attentive_found" not in stats
    assert stats.get("attentive_found") is None and stats.get("attentive_found", 7) == 7
    for unknown in ("attentive_found", "attention"):
        with pytest.raises(KeyError, match=unknown):
            stats[unknown]


@pytest.mark.filterwarnings("ignore")
def test_those_of_models_are_shown_as_well(tmp_path):
    fused = small_models.convert(net(), example_inputs=torch.randn(2, 4))
    loaded = kfconvert.load(kfconvert.save(fused, tmp_path / "fused"), model=net())
    nothing = kfconvert.auto_convert_model(nn.Identity(), example_inputs=torch.randn(2, 4))
    again = kfconvert.load(kfconvert.save(nothing, tmp_path / "nothing"), model=nn.Identity())
    for model in (fused, loaded, nothing, again, copy.deepcopy(fused)):
        assert "<h1>" in model.kfconvert_info()._repr_html_() and model.kfconvert_info()["attention_found"] == 0


def test_they_are_a_dict_like_any_other(converter):
    stats = converter.conversion_stats
    plain = dict(stats)
    assert isinstance(stats, dict) and stats == plain and repr(stats) == repr(plain)
    assert json.dumps(stats) == json.dumps(plain)
    for copied in (copy.copy(stats), copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert copied == stats and copied._repr_html_() == stats._repr_html_()
