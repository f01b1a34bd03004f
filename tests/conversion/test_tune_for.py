"""Several weighted inputs to tune for: every decision is one for all of them together."""

import warnings

import pytest
import torch
from torch import nn

import kfconvert
from kfconvert import ConversionError, ModelConverter, Weighted, auto_convert_model
from kfconvert.conversion import selector, timing, trials
from kfconvert.profiling import Comparison

# Milliseconds by rows of the input, of which the fused strategies are those of the whole site.
FAST_FOR_FEW = {2: {"original": 4.0, "fused": 1.0}, 32: {"original": 8.0, "fused": 10.0}}


def mlp():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8)).eval()


def rows_of(call):
    """How many rows the input of a candidate has, whatever it is wrapped in."""
    while not (hasattr(call, "args") and any(isinstance(arg, torch.Tensor) for arg in call.args)):
        if hasattr(call, "__self__"):
            return call.__self__.inputs[0].shape[0]
        call = call.args[0]
        call = call[0] if isinstance(call, list) else call
    return next(arg for arg in call.args if isinstance(arg, torch.Tensor)).shape[0]


@pytest.fixture
def times(monkeypatch):
    """Gives candidates of sites times by the rows of their inputs; whole models take the same."""

    def measured(candidates, *args, **kwargs):
        known = FAST_FOR_FEW[rows_of(candidates["original"])]
        return Comparison({n: [known["original" if n == "original" else "fused"]] * 9 for n in candidates})

    def equal(candidates, *args, **kwargs):
        return Comparison({name: [1.0] * 9 for name in candidates})

    monkeypatch.setattr(selector, "compare_timings", measured)
    monkeypatch.setattr(timing, "compare_timings", equal)


def statistics(model, **options):
    converter = ModelConverter(effort="fast")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing may be fused
        converter.convert_model(model, **options)
    return converter.conversion_stats


@pytest.mark.parametrize(
    ("tune_for", "fused"),
    [
        ([(2, 16), (32, 16)], True),
        ([(2, 16), Weighted((32, 16), 2)], False),
        ([Weighted((2, 16), 10), Weighted((32, 16), 12)], True),
        ([(32, 16), (2, 16), (32, 16)], False),
        ([(torch.randn(2, 16),), Weighted({"input": torch.randn(32, 16)}, 0.5)], True),
    ],
)
def test_sites_are_decided_by_the_weighted_sum_of_times(times, tune_for, fused):
    stats = statistics(mlp(), input_shape=(4, 16), tune_for=tune_for)
    assert stats["total_found"] == 2 and stats["total_replaced"] == (2 if fused else 0)


def test_reported_times_are_those_of_an_average_call(times):
    stats = statistics(mlp(), input_shape=(4, 16), tune_for=[Weighted((2, 16), 3), (32, 16)])
    assert [(site["original_us"], site["fused_us"]) for site in stats["sites"]] == [(5000.0, 3250.0)] * 2
    assert [(t["inputs"], t["weight"]) for t in stats["tuned_for"]] == [("float32[2, 16]", 3), ("float32[32, 16]", 1.0)]
    assert all(t["timings"]["timings"].keys() == {"original", "converted"} for t in stats["tuned_for"])


def test_an_artifact_keeps_what_was_tuned_for(tmp_path):
    converter = ModelConverter(select="all")
    fused = converter.convert_model(mlp(), tune_for=[(2, 16), Weighted((32, 16), 3)])
    again = kfconvert.load(kfconvert.save(fused, tmp_path / "saved"), model=mlp())
    assert again.kfconvert_info()["tuned_for"] == converter.conversion_stats["tuned_for"]


def test_without_another_example_the_first_of_them_is_it():
    stats = statistics(mlp(), tune_for=[(3, 16), (5, 16)])
    assert stats["inputs"] == "float32[3, 16]" and stats["dynamic"] == ["input.shape[0]"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fused = auto_convert_model(mlp(), tune_for=[(3, 16)])
    assert fused(torch.randn(2, 16)).shape == (2, 8)


def test_a_strategy_must_be_accurate_for_all_of_them(times, monkeypatch):
    error = trials.timed_error

    def worse_for_many(call, exact):
        found, seconds = error(call, exact)
        is_fused = getattr(call, "__name__", "") != "original"
        return found + (is_fused and len(exact[0]) == 32), seconds

    monkeypatch.setattr(trials, "timed_error", worse_for_many)
    assert statistics(mlp(), tune_for=[(2, 16)])["total_replaced"] == 2
    sites = statistics(mlp(), tune_for=[Weighted((2, 16), 1000), (32, 16)])["sites"]
    assert all(site["status"] == "rejected" and "against float64" in site["reason"] for site in sites)


def test_the_whole_is_given_back_where_it_is_slower_for_all_together(monkeypatch):
    def measured(candidates, *args, **kwargs):
        return Comparison({name: next(times[name]) for name in candidates})

    monkeypatch.setattr(timing, "compare_timings", measured)
    for after, reverted in (([1.0, 8.0, 14.0], False), ([1.0, 8.0, 16.0], True)):  # of the example, and of both
        times = {"original": iter([[9.0] * 9, [9.0] * 9, [14.0] * 9]), "converted": iter([[ms] * 9 for ms in after])}
        converter = ModelConverter()
        monkeypatch.setattr(selector.Selector, "_fastest", _first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            converter.convert_model(mlp(), input_shape=(4, 16), tune_for=[(2, 16), (32, 16)])
        assert bool(converter.conversion_stats["reverted"]) == reverted


def _first(self, operators, medians, ratios):
    return selector.Decision(next(iter(ratios)), None)


def test_an_input_that_nothing_captured_serves_is_told():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    with pytest.warns(UserWarning, match=r"no captured graph serves calls with float32\[2, 3, 9, 9\]"):
        ModelConverter(select="all").convert_model(model, tune_for=[(2, 3, 8, 8), (2, 3, 9, 9)])


@pytest.mark.parametrize(
    ("tune_for", "message"),
    [
        ([], "tune_for must be a list of inputs"),
        ((2, 16), "example_inputs must be a tensor"),
        (torch.randn(2, 16), "tune_for must be a list of inputs"),
        ([(2, 17)], "Sequential does not accept float32"),
        (["many"], "example_inputs must be a tensor"),
    ],
)
def test_what_cannot_be_tuned_for_is_an_error(tune_for, message):
    with pytest.raises(ConversionError, match=message):
        ModelConverter().convert_model(mlp(), input_shape=(4, 16), tune_for=tune_for)


@pytest.mark.parametrize("weight", [0, -1.0, float("inf"), float("nan"), True, "2"])
def test_weights_are_numbers_above_0(weight):
    with pytest.raises(ValueError, match="weight must be a number above 0"):
        kfconvert.Weighted((2, 16), weight)
