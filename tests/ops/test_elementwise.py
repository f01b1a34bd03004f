"""The functions of two tensors against plain ATen: broadcasting, layouts, special values, gradients, errors."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES
from support.selection import each_once

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.kernels.reference import scale_shift_act as scale_shift

OPERATORS = torch.ops.kfconvert


def inputs(shape, dim, dtype, device, scale=3.0):
    x = torch.randn(shape, device=device).mul(scale).to(dtype)
    return x, torch.randn(shape[dim], device=device).to(dtype), torch.randn(shape, device=device).to(dtype)


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_in_place(device, activation, dtype):
    x, bias, residual = inputs((4, 6, 5), 1, dtype, device)
    for layout in (x, x.transpose(1, 2).contiguous().transpose(1, 2), x.repeat(1, 1, 2)[:, :, ::2]):
        want = ops.bias_act(layout, bias, residual, activation, dim=1)
        mine = layout.as_strided(layout.shape, layout.stride())
        code = ops.ACTIVATIONS[activation].code
        assert OPERATORS.bias_act_(mine, bias, residual, code, 0.01, 1) is None
        assert torch.equal(layout, want)


def prelu_inputs(shape, dim, dtype, device):
    x, bias = torch.randn(shape, device=device), torch.randn(shape[dim], device=device)
    return [t.to(dtype) for t in (x, torch.rand(shape[dim], device=device), bias)]


def test_the_definition_of_prelu_bias(device):
    image, weight, bias = prelu_inputs((2, 8, 4, 6), 1, torch.float32, device)
    want = F.prelu(image + bias[:, None, None], weight)
    torch.testing.assert_close(reference.prelu_bias(image, weight, bias, dim=1), want)


@pytest.mark.parametrize("activation", ["none", "relu", "hardsigmoid", "relu6"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_of_scale_shift_act(device, activation, dtype):
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 60000.0])
    x = special.repeat(2, 8, 3).to(device, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = torch.tensor([1.0, 0.0, -1.0, 1e-3, float("nan"), float("inf"), -0.5, 1.0], device=device, dtype=wide)
    shift = torch.tensor([0.0, 1.0, -1.0, 0.5, 0.0, 1.0, float("inf"), float("nan")], device=device, dtype=wide)
    got = ops.scale_shift_act(x, scale, shift, activation)
    want = scale_shift(x.double(), scale.double(), shift.double(), activation).to(dtype)
    torch.testing.assert_close(got, want, equal_nan=True)


FORMULAS = {
    "geglu": lambda x, y, row: F.gelu(x) * y,
    "bias_relu": lambda x, y, row: F.relu(x + row),
    "bias_silu": lambda x, y, row: F.silu(x + row),
    "layer_norm_silu": lambda x, y, row: F.silu(F.layer_norm(x, (8,))),
    "add_layer_norm": lambda x, y, row: F.layer_norm(x + y, (8,)),
    "rms_norm": lambda x, y, row: F.rms_norm(x, (8,)),
    "add_rms_norm": lambda x, y, row: F.rms_norm(x + y, (8,)),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_names_say_what_is_computed(name):
    """Those whose definitions in kernels.reference come from the same text."""
    x, y, row = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    given = {"bias": (x, row), "laye": (x, 8), "rms_": (x, 8), "gegl": (x, y)}.get(name[:4], (x, y, 8))
    found = getattr(ops, name)(*given)
    torch.testing.assert_close(found[0] if isinstance(found, tuple) else found, FORMULAS[name](x, y, row))


def test_other_names():
    assert ops.elementwise_add_relu is ops.add_relu and ops.elementwise_mul_tanh is ops.mul_tanh
    assert ops.fused_bias_gelu is ops.bias_gelu and ops.fused_gelu_dropout is ops.gelu_dropout
    assert ops.fused_layer_norm_relu is ops.layer_norm_relu and ops.fused_add_norm is ops.add_layer_norm
    assert ops.fused_add_rms_norm is ops.add_rms_norm and ops.fused_attention_score is ops.attention_score
