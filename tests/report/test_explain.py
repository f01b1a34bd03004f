"""The explanation: every module with a finding is there, what is alike is told once, and the reason has its place."""

import io
import json

import pytest
import torch
from rich.console import Console
from torch import nn

from kfconvert import load, save
from kfconvert.converter import ConversionError, ModelConverter
from kfconvert.json_values import json_ready
from kfconvert.report.explain import Explanation, module_classes


def site(module, pattern="linear", reason=None, strategy="kernel"):
    status = "rejected" if reason else "applied"
    return {"pattern": pattern, "module": module, "status": status, "reason": reason, "strategy": strategy}


def miss(module, reason, place=None, pattern="conv_bn_relu"):
    return {"pattern": pattern, "module": module, "reason": reason, "location": place}


def stats(sites=(), misses=(), regions=(), **more):
    applied = sum(each["status"] == "applied" for each in sites)
    return {
        "model": "Net", "inputs": "float32[1, 3]", "total_found": len(sites), "total_replaced": applied,
        "sites": list(sites), "near_misses": list(misses), "regions": list(regions), **more,
    }  # fmt: skip


def lines(*args, **kwargs):
    """The tree without the guides that rich draws, one line each."""
    return [line.lstrip("│├└─ \xa0") for line in str(Explanation(*args, **kwargs)).splitlines()]


def layers(count, *names):
    return [f"encoder.layer.{index}.{name}" for index in range(count) for name in names]


def test_headline_and_findings():
    found = stats(
        [site("a"), site("b.c", "conv_bn", "error 1e-3 [in brackets]")],
        [miss("d", "its value goes to aten.elu.default in e", "pkg/net.py:12")],
    )
    assert lines(found) == [
        "Net  float32[1, 3]  1 of 2 sites fused",
        "a  linear: fused (kernel)",
        "b.c  conv_bn: not fused, error 1e-3 [in brackets]",
        "d  nearest conv_bn_relu: its value goes to aten.elu.default in e (pkg/net.py:12)",
    ]


def test_findings_of_the_root_have_no_name():
    assert lines(stats([site(""), site("")]))[1:] == ["linear: fused (kernel) (2 times)"]


def test_layers_that_are_alike_are_told_once():
    blocks = [f"encoder.layer.{index}" for index in range(12)]
    found = stats(
        [site(name) for name in layers(12, "attention.query", "attention.key", "attention.value")]
        + [site(name, "linear_gelu") for name in layers(12, "up")],
        [miss(f"{block}.norm", f"its value goes to aten.mul.Tensor in {block}.x") for block in blocks],
    )
    assert lines(found)[1:] == [
        "encoder.layer.0 ... encoder.layer.11 (12 alike)",
        "attention",
        "query, key, value (3 alike)  linear: fused (kernel)",
        "up  linear_gelu: fused (kernel)",
        "norm  nearest conv_bn_relu: its value goes to aten.mul.Tensor in encoder.layer.0.x",
    ]


def test_a_layer_that_differs_stands_alone():
    names = layers(5, "fc", "out")
    found = stats([site(name, reason="too few rows" if name == "encoder.layer.2.fc" else None) for name in names])
    told = lines(found)[1:]
    assert [line for line in told if line.startswith("encoder")] == [
        "encoder.layer.0, encoder.layer.1 (2 alike)",
        "encoder.layer.2",
        "encoder.layer.3, encoder.layer.4 (2 alike)",
    ]
    assert told.count("fc, out (2 alike)  linear: fused (kernel)") == 2
    assert "fc  linear: not fused, too few rows" in told


def test_classes_modules_order_and_what_is_left_out():
    model = nn.Sequential(nn.Linear(2, 2), nn.ELU(), nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 2))
    found = stats([site("3"), site("2.0")], [miss("0", "its value goes to aten.elu.default in 1")])
    assert lines(found, module_classes(model))[1:] == [
        "0  Linear  nearest conv_bn_relu: its value goes to aten.elu.default in 1",
        "2.0, 3 (2 alike)  Linear  linear: fused (kernel)",
        "modules without a site: 2",
    ]


def test_regions_of_modules_stand_with_them_and_fold():
    found = stats(
        [site(f"layers.{i}.fc") for i in range(6)],
        [],
        [{"name": "y", "captured": True, "reason": None}]
        + [{"name": n, "captured": False, "reason": "a branch", "module": "", "location": "net.py:3"} for n in "xz"]
        + [{"name": f"layers.{i}", "captured": True, "reason": None, "module": f"layers.{i}"} for i in range(6)]
        + [{"name": "h", "captured": False, "reason": "tolist", "module": "head", "location": "net.py:9"}],
    )
    assert lines(found)[1:] == [
        "captured as called with y",
        "not captured as called with x; z: a branch (net.py:3)",
        "layers.0 ... layers.5 (6 alike)  captured",
        "fc  linear: fused (kernel)",
        "head  not captured as called with h: tolist (net.py:9)",
    ]


def test_nothing_fused_is_said_first():
    found = stats(nothing_fused="none of its calls starts a pattern")
    assert lines(found) == ["Net  float32[1, 3]  0 of 0 sites fused: none of its calls starts a pattern"]


def test_colours_are_for_terminals_only():
    explanation = Explanation(stats([site("a")], [], [{"name": "[bold]x", "captured": True, "reason": None}]))
    stream = io.StringIO()
    Console(file=stream, force_terminal=True, width=80, color_system="standard").print(explanation)
    assert "\x1b[32m" in stream.getvalue() and "[bold]x" in stream.getvalue()
    assert "\x1b" not in str(explanation) and all(line == line.rstrip() for line in str(explanation).splitlines())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(nn.functional.elu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.soft = nn.Softmax(1)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x):
        x = nn.functional.elu(self.soft(x)).mean((2, 3))
        for block in self.blocks:
            x = block(x)
        return x


def test_a_converted_model_and_its_artifact(tmp_path):
    converter = ModelConverter(select="all")
    with pytest.raises(ConversionError, match="nothing to explain yet: call convert_model first"):
        converter.explain()
    fused = converter.convert_model(Net(), input_shape=(2, 8, 6, 6))
    text = str(converter.explain())
    assert "Net  float32[2, 8, 6, 6]  10 of 10 sites fit" in text
    assert "blocks.0 ... blocks.4 (5 alike)  Block" in text and "up, down (2 alike)  Linear  linear: fits" in text
    assert "soft  Softmax  nearest attention: its value goes to aten.elu.default" in text
    assert f"({__file__}:" in text and "modules without" not in text
    again = load(save(fused, tmp_path / "net"), model=Net())
    stored = json.loads(json.dumps(json_ready(fused.kfconvert_info())))
    for info in (fused.kfconvert_info(), again.kfconvert_info(), stored):
        shown = str(Explanation(info, module_classes(again)))
        assert shown.replace("x=float32", "float32") == text  # a loaded model was called by keyword


class Activations(nn.Module):
    """One activation that a pattern takes, and others that none does."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.elu = nn.Linear(8, 8), nn.Linear(8, 8), nn.ELU()

    def forward(self, x):
        x = self.elu(torch.relu(self.up(torch.tanh(x))))
        return nn.functional.softplus(self.down(x))


def test_an_activation_that_no_pattern_takes_is_named():
    converter = ModelConverter(select="all", exclude=["linear_relu"])
    converter.convert_model(Activations().eval(), example_inputs=torch.randn(3, 8))
    told = str(converter.explain())
    assert "no pattern takes aten.tanh.default (" in told
    assert "no pattern takes aten.elu.default after aten.relu.default (" in told
    assert "no pattern takes aten.softplus.default after aten.linear.default (" in told
    assert "test_explain.py:" in told and "aten.relu.default (" not in told.replace("after aten.relu.default (", "")
    modules = {each["operator"]: each["module"] for each in converter.conversion_stats["unmatched_activations"]}
    assert modules == {"aten.tanh.default": "", "aten.elu.default": "elu", "aten.softplus.default": ""}
