"""The memory that statistics and report state is what was measured."""

import gc

import pytest
import torch
from support import small_models
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import kfconvert
from kfconvert.report.table import memory_line

pytestmark = pytest.mark.filterwarnings("ignore")


class Scale(nn.Module):
    """Nothing that could be fused. (batch, 8) -> (batch, 8)"""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x * self.factor


def statistics(model, example):
    converter = kfconvert.ModelConverter(select="all", effort="fast", validate_accuracy=False)
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
    assert stats["gated_linear_silu_replaced"] == 1 and stats["memory"]["derived"] == 0
    assert "derived" not in memory_line(stats)


def test_nothing_is_measured_where_nothing_was_fused_or_another_profiler_runs():
    plain = statistics(Scale(), torch.randn(2, 8))
    assert plain["memory"] == {
        "weights": 32,
        "derived": None,
        "recordings": 0,
        "peak": {"original": None, "converted": None},
    }
    with torch.autograd.profiler.profile():
        profiled = statistics(small_models.cnn(), torch.randn(4, 3, 12, 12))["memory"]
    assert profiled["weights"] and profiled["derived"] is None and profiled["peak"]["converted"] is None
    assert memory_line({"memory": profiled}).startswith("weights") and memory_line({}) == ""


def test_a_layer_that_has_no_shape_yet_does_not_count():
    model = Scale()
    model.unused = nn.LazyLinear(3)
    assert statistics(model, torch.randn(2, 8))["memory"]["weights"] == 32


def test_a_loaded_model_carries_the_numbers_of_its_conversion(tmp_path):
    fused = small_models.convert(small_models.cnn())
    known = fused.kfconvert_info()["memory"]
    assert known["derived"]
    loaded = kfconvert.load(kfconvert.save(fused, tmp_path / "saved"), model=small_models.cnn())
    assert loaded.kfconvert_info()["memory"] == known


def test_conversions_leave_no_graph_behind():
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8)).eval()

    def kept():
        statistics(model, torch.randn(2, 8))
        gc.collect()
        return sum(type(each) is ShapeEnv for each in gc.get_objects())

    assert kept() == kept()
