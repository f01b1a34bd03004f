"""Arguments of a wrong type: one line that names the argument, with and without compiled kernels."""

import inspect
import re
import types
import typing

import numpy
import pytest
import torch
from support.operator_arguments import arguments

from kfconvert import extension, ops

t = torch.randn

# The arguments of these are torch's to refuse.
NOT_HERE = {"fused_adam", "fused_adamw", "fused_sgd", "get_cuda_softmax"}

# A tensor, but None is taken for nothing to add.
MAY_BE_NONE = {("bias_dropout_add", "residual"), *((f"bias_{act}", "bias") for act in ("gelu", "relu", "silu"))}


def functions():
    """name -> function, without second names"""
    named = {name: getattr(ops, name) for name in ops.__all__ if isinstance(getattr(ops, name), types.FunctionType)}
    return {name: f for name, f in named.items() if f.__name__ == name and name not in NOT_HERE}


def valid(name):
    return arguments(name, "cpu")


def tensor_parameters(function):
    """(name, whether it may be None) of those that take nothing but a tensor"""
    for name, parameter in inspect.signature(function).parameters.items():
        kinds = typing.get_args(parameter.annotation) or (parameter.annotation,)
        if torch.Tensor in kinds and set(kinds) <= {torch.Tensor, type(None)}:
            yield name, type(None) in kinds


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("name", functions())
def test_no_tensor(compiled, name, grad):
    function = functions()[name]
    if name == "contract":  # whose tensors have no names
        pytest.skip("see test_contraction.py")
    given = dict(zip(inspect.signature(function).parameters, valid(name)))
    function(**given)
    for parameter, optional in tensor_parameters(function):
        optional = optional or (name, parameter) in MAY_BE_NONE
        for wrong in (3, 2.5, "text", [1.0], numpy.ones(3, "float32"), *(() if optional else (None,))):
            # torch, and an operator that is called by another, name an argument as they know it.
            named = rf"\b{parameter}\b|argument '\w+'|must be a tensor"
            with torch.set_grad_enabled(grad), pytest.raises((TypeError, RuntimeError)) as caught:
                function(**{**given, parameter: wrong})
            assert re.search(named, str(caught.value)), (parameter, wrong, caught.value)


@pytest.mark.parametrize("wrong", ["text", None, [1.0, 2.0], numpy.ones(3)], ids=lambda wrong: type(wrong).__name__)
@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("attention_dropout", "p"), ("batch_norm_relu", "eps"), ("bias_dropout_add", "p"), ("bias_relu", "dim"),
        ("block_sparse_attention", "block_size"), ("conv2d_bn_act", "eps"), ("conv2d_gelu_dropout", "p"),
        ("chunked_attention", "chunk_size"), ("cross_entropy", "ignore_index"), ("cross_entropy", "label_smoothing"),
        ("dequantize_int8", "zero_point"), ("fused_multihead_attention", "num_heads"), ("gelu_dropout", "p"),
        ("group_norm_silu", "eps"), ("group_norm_silu", "num_groups"), ("layer_norm_relu", "eps"),
        ("quantize_int8", "scale"), ("ffn_block", "dropout_p"), ("sliding_window", "size"),
        ("sliding_window", "stride"), ("sliding_window_mean_std", "window"), ("softmax", "dim"),
    ],
)  # fmt: skip
def test_no_number(compiled, name, parameter, wrong):
    function = getattr(ops, name)
    given = dict(zip(inspect.signature(function).parameters, valid(name)))
    match = rf"kfconvert::\w+: {parameter} must be (a number|an integer), got|argument '{parameter}'"
    with pytest.raises((TypeError, RuntimeError), match=match):
        function(**{**given, parameter: wrong})


def test_no_numbers(compiled):
    image, mean, std = valid("normalize_image")
    for wrong in (0.5, None, "text", [0.5, None, 0.5]):
        with pytest.raises((TypeError, RuntimeError), match="kfconvert::normalize_image: std must be"):
            ops.normalize_image(image, mean, wrong)
    for wrong in (1.5, "text", [1.5], numpy.ones(2)):
        with pytest.raises(TypeError, match="kfconvert::reduce_mean_abs: dim must be integers, got"):
            ops.reduce_mean_abs(t(5, 3), wrong)
    for wrong in (1.5, None, "text", t(33)):
        with pytest.raises(TypeError, match="^kfconvert: normalized_shape must be an integer or a tuple of integers"):
            ops.add_rms_norm(t(5, 33), t(5, 33), wrong)


def test_the_names_of_the_call(compiled):
    """Those of the function that was called, not of the operator behind it."""
    x, even = t(5, 33), t(4, 5, 8)
    for call, message in (
        (lambda: ops.add_relu(3, x), "kfconvert::add_relu: x must be a tensor, got int"),
        (lambda: ops.swish_multiply(x, 2.5), "kfconvert::swish_multiply: up must be a tensor, got float"),
        (lambda: ops.rms_norm_gelu([1.0], 33), "kfconvert::rms_norm_gelu: x must be a tensor, got list"),
        (lambda: ops.ffn_block(x, x, 1, x, None), "kfconvert::ffn_block: b1 must be a tensor, got int"),
        (lambda: ops.rope_attention(*even, ()), "kfconvert::rope_attention: sin must be a tensor, got tuple"),
    ):
        with pytest.raises(TypeError, match=f"^{message}$"):
            call()


def test_in_the_compiler(compiled):
    function = torch.compile(ops.add_relu, backend="aot_eager", fullgraph=True)
    x, y = t(5, 3), t(5, 3)
    assert torch.equal(function(x, y), torch.relu(x + y))


def test_none_reaches_no_kernel():
    if not extension.EXTENSION_LOADED:
        pytest.skip("no compiled kernels")
    x, channels = t(2, 6, 5), t(6)
    operators = torch.ops.kfconvert
    for call, name in (
        (lambda: operators.combine_act_inference(x, None, 0, 0, 0.01), "other"),
        (lambda: operators.batch_norm_act_inference(x, None, channels, None, None, 1e-5, 0, 0.01), "mean"),
        (lambda: operators.batch_norm_act_inference(x, channels, None, None, None, 1e-5, 0, 0.01), "variance"),
        (lambda: operators.scale_shift_act_inference(x, channels, None, 0, 0.01), "shift"),
        (lambda: operators.rope_inference(t(3, 4), t(3, 4), None, False, False), "sin"),
    ):
        with pytest.raises(RuntimeError, match=f"{name} must be a tensor, got None"):
            call()
