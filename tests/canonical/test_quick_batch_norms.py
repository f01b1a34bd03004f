"""Batch norms in a trace: the operator in the graph, and what it says of its result."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kfconvert import ModelConverter
from kfconvert.capture.tracer import trace
from kfconvert.graph.trees import aten
from kfconvert.inputs.example import ExampleCall


def norms(model, x):
    region = trace(model, ExampleCall((x,)))
    return [node for node in region.graph.nodes if node.target is aten.batch_norm.default]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 5), (2, 3, 5, 4), (2, 3, 2, 5, 4)])
def test_inference_is_traced_as_pytorch_traces_it(shape, affine):
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    model, x = kind(3, eps=1e-3, affine=affine).eval(), torch.randn(shape)
    (ours,) = norms(model, x)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), strict=False)
    (theirs,) = (node for node in program.graph.nodes if node.target is aten.batch_norm.default)
    for mine, their in zip(ours.args, theirs.args, strict=True):
        # Parameters are placeholders of the same names.
        assert str(mine) == str(their)
    assert ours.meta["val"].shape[1:] == theirs.meta["val"].shape[1:]
    assert ours.meta["val"].stride()[-1] == theirs.meta["val"].stride()[-1]
    assert ours.meta["nn_module_stack"].keys() == theirs.meta["nn_module_stack"].keys()


def test_layout_and_dtype_are_those_of_the_input():
    x = torch.randn(2, 4, 6, 6, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    (node,) = norms(nn.BatchNorm2d(4).eval(), x)
    value = node.meta["val"]
    assert value.dtype is torch.bfloat16 and value.is_contiguous(memory_format=torch.channels_last)


def test_statistics_of_the_batch_are_left_to_pytorch():
    class Model(nn.Module):
        def forward(self, x):
            return F.batch_norm(x, None, None, training=True)

    (node,) = norms(Model().eval(), torch.randn(4, 3, 5))
    assert node.args[5] is True


def test_what_pytorch_refuses_is_refused_in_the_trace():
    class Tries(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            try:
                return F.batch_norm(x, self.norm.running_mean[:2], self.norm.running_var[:2])
            except RuntimeError:
                return torch.relu(self.norm(x))

    model, x = Tries().eval(), torch.randn(4, 3)
    converter = ModelConverter(select="all")
    converted = converter.convert_model(model, example_inputs=x)
    assert converter.conversion_stats["total_replaced"] == 1
    with torch.no_grad():
        torch.testing.assert_close(converted(x), model(x))


def test_a_call_by_keywords():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x):
            mean, variance = self.norm.running_mean, self.norm.running_var
            return F.batch_norm(input=x, running_mean=mean, running_var=variance, bias=self.norm.bias, eps=0.5)

    (node,) = norms(Model().eval(), torch.randn(4, 3))
    assert node.args[1] is None and str(node.args[2]).endswith("bias") and node.args[5:8] == (False, 0.1, 0.5)
