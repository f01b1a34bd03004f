"""The memory that statistics and report state is what was measured."""

import gc

import pytest
import torch
from support import small_models
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import kfconvert
from kfconvert.conversion.selector import Decision, Selector
from kfconvert.report.table import memory_line

pytestmark = pytest.mark.filterwarnings("ignore")


class Scale(nn.Module):
    """Nothing that could be fused. (batch, 8) -> (batch, 8)"""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.factor


def statistics(model, example, **options):
    converter = kfconvert.ModelConverter(select="all", effort="fast", validate_accuracy=False, **options)
    converter.convert_model(model, example_inputs=example)
    return converter.conversion_stats


def test_folded_weights_are_derived_and_intermediates_are_the_peak():
    model = small_models.cnn()
    stats = statistics(model, torch.randn(4, 3, 12, 12))
    memory = stats["memory"]
    assert memory["weights"] == sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    # Each convolution has a folded weight and bias, which may be packed besides.
    assert memory["derived"] >= 4 * (8 * 27 + 8 + 8 * 72 + 8)
    image = 4 * 8 * 12 * 12 * 4
    assert 2 * image <= memory["peak"]["original"] <= 6 * image
    assert 0 < memory["peak"]["converted"] <= memory["peak"]["original"]
    assert memory["recordings"] == 0
    line = memory_line(stats)
    assert "weights" in line and "derived" in line and "peak of a forward" in line and "->" in line


def test_merged_weights_are_not_derived():
    stats = statistics(small_models.llama(), {"input_ids": torch.arange(3, 17).reshape(2, 7)})
    assert stats["gated_linear_silu_replaced"] == 1
    assert stats["memory"]["derived"] <= 1  # a constant of the causal mask
    assert "derived" not in memory_line({"memory": stats["memory"] | {"derived": 0}})


def test_nothing_is_measured_where_nothing_was_fused_or_another_profiler_runs():
    plain = statistics(Scale(), torch.randn(2, 8))
    assert plain["memory"] == {
        "weights": 32,
        "derived": None,
        "allowed": None,
        "recordings": 0,
        "peak": {"original": None, "converted": None},
    }
    with torch.autograd.profiler.profile():
        profiled = statistics(small_models.cnn(), torch.randn(4, 3, 12, 12))["memory"]
    assert profiled["weights"] and profiled["derived"] is None and profiled["peak"]["converted"] is None
    assert memory_line({"memory": profiled}).startswith("weights") and memory_line({}) == ""


def is_dropped(site):
    return (site["reason"] or "").startswith("max_extra_memory: its derived weights take")


@pytest.mark.parametrize("limit", [2000, 0.5])
def test_what_is_derived_is_bounded(limit, tmp_path):
    example, model = torch.randn(4, 3, 12, 12), small_models.cnn()
    unbounded = statistics(model, example)["memory"]["derived"]
    converter = kfconvert.ModelConverter(select="all", effort="fast", max_extra_memory=limit)
    fused = converter.convert_model(model, example_inputs=example)
    memory = converter.conversion_stats["memory"]
    assert memory["allowed"] == (limit if isinstance(limit, int) else int(limit * memory["weights"]))
    assert 0 <= memory["derived"] <= memory["allowed"] and "may be derived" in memory_line(converter.conversion_stats)
    dropped = [s for s in converter.conversion_stats["sites"] if is_dropped(s)]
    assert bool(dropped) == (memory["allowed"] < unbounded)
    assert converter.conversion_stats["accuracy"]["passed"]
    with torch.no_grad():
        torch.testing.assert_close(fused(example), model(example), rtol=1e-4, atol=1e-5)
    again = kfconvert.load(kfconvert.save(fused, tmp_path / "saved"), model=small_models.cnn())
    assert again.kfconvert_info()["total_replaced"] == converter.conversion_stats["total_replaced"]


def test_sites_that_gain_least_are_dropped_first_where_they_make_room(monkeypatch):
    def bounded(limit):
        gains = iter(range(100))

        def decide(self, tried, operators):
            return Decision(next(iter(tried.plans)), None, 10.0 + next(gains), 10.0)

        monkeypatch.setattr(Selector, "_decision", decide)
        stats = statistics(small_models.cnn(), torch.randn(4, 3, 12, 12), max_extra_memory=limit)
        return [s["module"] for s in stats["sites"] if is_dropped(s)], stats["memory"]["derived"]

    # How large packed weights are is the CPU's matter.
    dropped, everything = bounded(2**40)
    assert not dropped
    dropped, of_conv2 = bounded(everything - 1)
    assert dropped == ["conv1"] and of_conv2 > everything - of_conv2 > 0
    assert bounded(of_conv2 - 1) == (["conv2"], everything - of_conv2)
    assert bounded(everything - of_conv2 - 1) == (["conv1", "conv2"], 0)


@pytest.mark.parametrize("limit", [-1, float("nan")])
def test_bounds_that_are_none(limit):
    with pytest.raises(kfconvert.ConversionError, match="max_extra_memory must be bytes as an int or a share"):
        kfconvert.ModelConverter(max_extra_memory=limit)


def test_a_layer_that_has_no_shape_yet_does_not_count():
    model = Scale()
    model.unused = nn.LazyLinear(3)
    assert statistics(model, torch.randn(2, 8))["memory"]["weights"] == 32


def test_a_bound_that_cannot_be_measured_is_an_error():
    with torch.autograd.profiler.profile(), pytest.raises(kfconvert.ConversionError, match="cannot be measured on cpu"):
        statistics(small_models.cnn(), torch.randn(4, 3, 12, 12), max_extra_memory=0.5)


def test_conversions_leave_no_graph_behind():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)).eval()

    def kept():
        statistics(model, torch.randn(2, 8))
        gc.collect()
        return sum(type(each) is ShapeEnv for each in gc.get_objects())

    assert kept() == kept()
