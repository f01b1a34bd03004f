"""How much a conversion does and measures: ``effort``."""

import dataclasses
import warnings

import pytest
import torch
from support import small_models
from torch import nn

from kfconvert import ConversionError, ModelConverter, auto_convert_model
from kfconvert.capture import captured
from kfconvert.conversion import EFFORTS, selector, timing
from kfconvert.conversion import effort as effort_of
from kfconvert.profiling import Comparison


def converted(model, **options):
    """The converted model and the statistics."""
    given = {name: options.pop(name) for name in ("input_shape", "example_inputs") if name in options}
    converter = ModelConverter(**options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a busy machine models this small may not come out faster
        return converter.convert_model(model, **given), converter.conversion_stats


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, input_ids, attention_mask=None):
        x = nn.functional.gelu(self.linear(self.embedding(input_ids)))
        return x if attention_mask is None else x * attention_mask[..., None]


def test_fast_captures_for_calls_like_the_example_alone():
    model = Tokens().eval()
    fused, fast = converted(model, input_shape=(2, 7), effort="fast", select="all")
    _, full = converted(model, input_shape=(2, 7), select="all")
    assert [(region["module"], region["captured"]) for region in fast["regions"]] == [("", True)]
    assert len(full["regions"]) > 1 and fast["total_replaced"] == full["total_replaced"] > 0
    ids = torch.arange(3, 18).reshape(3, 5)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the second call runs the original, as is said
        for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
            torch.testing.assert_close(fused(**inputs), model(**inputs), rtol=1e-4, atol=1e-5)
    assert fused.kfconvert_info()["guard"]["hits"] == 1


class Branching(nn.Module):
    """Control flow on data: only its layers can be captured."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        outputs = [layer(x) for layer in self.layers]
        return outputs[0] if x.sum() > 0 else outputs[1]


def test_fast_captures_parts_where_the_model_cannot_be():
    _, stats = converted(Branching(), input_shape=(4, 16), effort="fast", select="all")
    assert stats["total_replaced"] == 2


def test_fast_measures_for_a_quarter_of_the_time(monkeypatch):
    budgets = []

    def watched(candidates, device, budget_s, **kwargs):
        budgets.append(budget_s / len(candidates))
        # Which is faster, and so what is measured next, is the same both times.
        return Comparison({name: [1.0 + index] * 9 for index, name in enumerate(candidates)})

    monkeypatch.setattr(selector, "compare_timings", watched)
    monkeypatch.setattr(timing, "compare_timings", watched)
    spent = {}
    for effort in ("full", "fast"):
        budgets.clear()
        converted(small_models.cnn(), input_shape=(1, 3, 12, 12), effort=effort)
        spent[effort] = set(budgets)
    assert spent["fast"] <= {budget / 4 for budget in spent["full"]} and spent["fast"]


def test_fast_takes_the_times_that_full_has_remembered_but_not_the_other_way(monkeypatch, tmp_path):
    remembered = {}
    for first, second in (("full", "fast"), ("fast", "full")):
        monkeypatch.setenv("KFCONVERT_CACHE", str(tmp_path / first))
        for effort in (first, second):
            _, stats = converted(nn.Sequential(nn.Linear(16, 64), nn.GELU()), input_shape=(4, 16), effort=effort)
            remembered[first, effort] = stats["remembered"]
    assert remembered["full", "fast"] > 0 and remembered["fast", "full"] == 0


def test_sites_that_no_time_is_left_for_are_left_as_they_were(monkeypatch):
    monkeypatch.setitem(EFFORTS, "fast", dataclasses.replace(EFFORTS["fast"], selection=0.0))
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 32), nn.ReLU())
    _, stats = converted(model, input_shape=(4, 8), effort="fast", select="all")
    reasons = [site["reason"] for site in stats["sites"]]
    assert reasons == [None, "skipped: effort='fast' ends the selection after 0 s"]


@pytest.mark.parametrize("effort", ["slow", "", None, 1])
def test_other_words_are_an_error(effort):
    with pytest.raises(ConversionError, match="effort must be 'fast' or 'full', not"):
        auto_convert_model(nn.Linear(2, 2), input_shape=(1, 2), effort=effort)


@pytest.mark.parametrize(("effort", "model"), [("fast", Branching()), ("full", Branching().layers[0])])
def test_every_trace_has_a_deadline(monkeypatch, effort, model):
    seconds, trace = [], captured.trace

    def noted(module, call, dimensions, limit):
        seconds.append(limit)
        return trace(module, call, dimensions, limit)

    monkeypatch.setattr(captured, "trace", noted)
    converted(model, effort=effort, input_shape=(4, 16))
    assert seconds and all(limit <= 300.0 for limit in seconds)
    assert effort == "full" or max(seconds) < EFFORTS["fast"].seconds + 1


def test_fast_leaves_what_its_seconds_do_not_suffice_for(monkeypatch):
    monkeypatch.setattr(effort_of, "LEAST_FOR_CAPTURES", 0.0)
    monkeypatch.setattr(effort_of, "FORWARDS", 0)
    monkeypatch.setitem(EFFORTS, "fast", dataclasses.replace(EFFORTS["fast"], seconds=0.0))
    model, x = Branching().eval(), torch.randn(4, 16)
    fused, stats = converted(model, effort="fast", example_inputs=x)
    assert stats["total_found"] == 0 and stats["parts_left_out"] >= 1
    assert torch.equal(fused(x), model(x))
