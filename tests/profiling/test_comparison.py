"""Bookkeeping of the timings; no test asserts how long anything takes."""

import dataclasses
import json

import pytest
import torch

from kfconvert.profiling import Comparison, Timing, compare_timings
from kfconvert.profiling import comparison as comparing


def test_candidates_take_turns_in_alternating_order(monkeypatch):
    monkeypatch.setattr(comparing, "WARM_UP_SHARE", 0.0)
    calls = []
    candidates = {name: lambda name=name: calls.append(name) for name in "abc"}
    compare_timings(candidates, budget_s=0.0, min_rounds=4)
    assert "".join(calls) == "abc" + "abc" + "cba" + "abc" + "cba"  # the first call of each is not a round


def test_at_least_min_rounds_and_no_more_than_the_cap(monkeypatch):
    assert compare_timings({"a": lambda: None}, budget_s=0.0, min_rounds=3)["a"].rounds == 3
    monkeypatch.setattr(comparing, "MAX_ROUNDS", 20)
    assert compare_timings({"a": lambda: None}, budget_s=60.0)["a"].rounds == 20


def test_candidates_that_have_run_need_no_warm_up():
    calls = []
    candidates = {name: lambda name=name: calls.append(name) for name in "ab"}
    compare_timings(candidates, budget_s=0.0, min_rounds=2, settled=True)
    assert "".join(calls) == "ab" + "ba"


def test_rounds_end_when_it_is_decided():
    asked = []

    def decided(samples):
        asked.append({name: len(times) for name, times in samples.items()})
        return len(asked) == 3

    comparison = compare_timings({"a": lambda: None, "b": lambda: None}, budget_s=60.0, min_rounds=2, decided=decided)
    assert asked == [{"a": rounds, "b": rounds} for rounds in (2, 3, 4)] and comparison["a"].rounds == 4


def test_gradients_are_off_and_errors_of_a_candidate_are_raised():
    seen = []
    compare_timings({"a": lambda: seen.append(torch.is_grad_enabled())}, budget_s=0.0)
    assert torch.is_grad_enabled() and not any(seen)
    with pytest.raises(ZeroDivisionError):
        compare_timings({"good": lambda: None, "bad": lambda: 1 / 0}, budget_s=0.0)


def test_timings_are_medians_and_quartiles():
    comparison = Comparison({"base": [4.0, 2.0, 3.0, 1.0, 5.0]})
    assert comparison["base"] == Timing(median_ms=3.0, q1_ms=2.0, q3_ms=4.0, rounds=5)
    assert Comparison({"base": [7.0]})["base"] == Timing(7.0, 7.0, 7.0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        comparison["base"].rounds = 6


def test_speedup_is_the_median_of_the_ratios_within_rounds():
    # the machine gets slower from round to round; the ratios within the rounds do not change
    base = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    comparison = Comparison({"base": base, "half": [t / 2 for t in base], "double": [t * 2 for t in base]})
    faster, slower = comparison.speedup("half"), comparison.speedup("double")
    assert (faster.ratio, faster.low, faster.high) == (2.0, 2.0, 2.0)
    assert faster.measurable and faster.summary().startswith("2.00 x faster")
    assert slower.measurable and slower.summary().startswith("2.00 x slower")
    assert comparison.speedup("half", baseline="double").ratio == 4.0


@pytest.mark.parametrize(
    "candidate",
    [
        [1.3, 0.8, 1.1, 0.9, 1.2, 0.7, 1.0],  # scattered on both sides
        [0.995] * 7,  # half a per cent, however steady
        [0.2] * 6 + [1.5],  # too few rounds to rule out chance
    ],
)
def test_a_difference_inside_the_noise_is_called_so(candidate):
    comparison = Comparison({"base": [1.0] * 7, "new": candidate})
    assert not comparison.speedup("new").measurable
    assert "no measurable difference" in comparison.speedup("new").summary()


def test_report():
    comparison = Comparison({"base": [2.0] * 9, "new": [1.0] * 9, "other": [4.0] * 9})
    report = json.loads(json.dumps(comparison.as_dict(), allow_nan=False))
    assert report["baseline"] == "base"
    assert report["timings"]["new"] == {
        "median_ms": 1.0, "q1_ms": 1.0, "q3_ms": 1.0, "rounds": 9
    }  # fmt: skip
    assert report["speedups"]["new"]["ratio"] == 2.0 and report["speedups"]["new"]["measurable"] is True
    assert set(report["speedups"]) == {"new", "other"}
    assert list(comparison) == ["base", "new", "other"] and len(comparison) == 3


@pytest.mark.cuda
def test_on_a_gpu_each_call_is_waited_for():
    x = torch.randn(2048, 2048, device="cuda")
    done = torch.cuda.Event()

    def product():
        result = x @ x
        done.record()
        return result

    assert compare_timings({"a": product}, "cuda", budget_s=0.05)["a"].rounds >= 7
    assert done.query()
