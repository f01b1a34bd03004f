"""Calls with arguments in another order: plain PyTorch's result or one line of an error, no wrong numbers."""

import inspect
import re
import typing

import pytest
import torch
import torch.nn.functional as F
from test_arguments import functions, valid

from kfconvert import ops

WRONG_FLAGS = (1, 0, 1e-5, "text", None, torch.tensor(True), torch.ones(2))
WRONG_NUMBERS = (True, False, torch.ones(2))


def parameters(wanted):
    """(name of the operator, of the parameter, its kinds) of those with one of the ``wanted`` kinds."""
    for name, function in functions().items():
        for parameter in inspect.signature(function).parameters.values():
            kinds = set(typing.get_args(parameter.annotation) or (parameter.annotation,))
            if kinds & wanted:
                yield pytest.param(name, parameter.name, kinds, id=f"{name}-{parameter.name}")


def refuses(name, parameter, wrong):
    function = functions()[name]
    given, signature = valid(name), inspect.signature(function)
    names = [p.name for p in signature.parameters.values() if p.kind == p.POSITIONAL_OR_KEYWORD]
    ways = [lambda: function(**{**dict(zip(names, given)), parameter: wrong})]
    if parameter in names:  # by position, the defaults between filled in
        place = names.index(parameter)
        defaults = [signature.parameters[n].default for n in names[len(given) : place]]
        ways.append(lambda: function(*given[:place], *defaults, wrong))
    for call in ways:
        with pytest.raises(TypeError, match=rf"^kfconvert::{name}: {parameter} must be .*, got \w+$"):
            call()


@pytest.mark.parametrize(("name", "parameter", "kinds"), parameters({bool}))
def test_a_flag_is_true_or_false(name, parameter, kinds):
    for wrong in WRONG_FLAGS:
        refuses(name, parameter, wrong)


@pytest.mark.parametrize(("name", "parameter", "kinds"), parameters({int, float}))
def test_a_number_is_no_flag_and_no_row(name, parameter, kinds):
    for wrong in WRONG_NUMBERS:
        if isinstance(wrong, bool) or not (torch.Tensor in kinds or tuple in map(typing.get_origin, kinds)):
            refuses(name, parameter, wrong)


def vectors(count):
    return [torch.rand(6) + 0.5 for _ in range(count)]


X, MASK = torch.randn(4, 6), torch.rand(4, 6) > 0.5
W, B, MEAN, VAR = vectors(4)
IMAGE, KERNEL = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
Q = torch.randn(2, 3, 5, 4)
# Calls in the order of torch's functions, every argument by position: (ours, torch's, arguments). What torch's has and
# ours has not must be refused, which arguments of the same kind in another place would not be.
TORCH_ORDER = {
    "layer_norm_relu": (ops.layer_norm_relu, lambda *a: F.layer_norm(*a).relu(), (X, (6,), W, B, 1e-3)),
    "layer_norm_act": (ops.layer_norm_act, F.layer_norm, (X, (6,), W, B, 1e-3)),
    "rms_norm": (ops.rms_norm, F.rms_norm, (X, (6,), W, 1e-3)),
    "rms_norm_gelu": (ops.rms_norm_gelu, lambda *a: F.gelu(F.rms_norm(*a)), (X, (6,), W, 1e-3)),
    "group_norm_silu": (ops.group_norm_silu, lambda *a: F.silu(F.group_norm(*a)), (X, 3, W, B, 1e-3)),
    "batch_norm_act": (ops.batch_norm_act, F.batch_norm, (X, MEAN, VAR, W, B)),
    "batch_norm_act, in eval": (ops.batch_norm_act, F.batch_norm, (X, MEAN, VAR, W, B, False)),
    "batch_norm_act, all": (ops.batch_norm_act, F.batch_norm, (X, MEAN, VAR, W, B, False, 0.1, 1e-3)),
    "linear_act": (ops.linear_act, F.linear, (X, X, torch.ones(4))),
    "conv_act": (ops.conv_act, F.conv2d, (IMAGE, KERNEL, torch.ones(4), 2, 1, 1, 1)),
    "conv_act, bias alone": (ops.conv_act, F.conv2d, (IMAGE, KERNEL, torch.ones(4))),
    "conv2d_gelu_dropout": (ops.conv2d_gelu_dropout, F.conv2d, (IMAGE, KERNEL, torch.ones(4), 1, 1)),
    "softmax": (ops.softmax, torch.softmax, (X, 0)),
    "softmax, dtype": (ops.softmax, torch.softmax, (X, -1, torch.float64)),
    "softmax, masked": (ops.softmax, lambda x, dim, m: x.masked_fill(~m, -torch.inf).softmax(dim), (X, -1, MASK)),
    "cross_entropy": (ops.cross_entropy, F.cross_entropy, (X, torch.arange(4), W)),
    "cross_entropy, no weight": (ops.cross_entropy, F.cross_entropy, (X, torch.arange(4), None, None, -100)),
    "mse_loss": (ops.mse_loss, F.mse_loss, (X, X + 1, None, None, "sum")),
    "gelu_dropout": (ops.gelu_dropout, F.gelu, (X, "tanh")),
    "gelu_dropout, dropout's": (ops.gelu_dropout, lambda x, p, t: F.dropout(F.gelu(x), p, t), (X, 0.0, False)),
    "attention_dropout": (ops.attention_dropout, lambda x, p, t: F.dropout(x.softmax(-1), p, t), (X, 0.5, False)),
    "flash_attention": (ops.flash_attention, F.scaled_dot_product_attention, (Q, Q, Q, torch.ones(5, 5))),
    "flash_attention, dropout": (ops.flash_attention, F.scaled_dot_product_attention, (Q, Q, Q, None, 0.0)),
    "flash_attention, causal": (
        ops.flash_attention,
        lambda q, k, v, causal: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        (Q, Q, Q, True),
    ),
    "rope, of queries and keys": (ops.rope, lambda q, k, cos, sin: None, (Q, Q, Q, Q)),
    "prelu_bias": (lambda x, w, b: ops.prelu_bias(x, w, b), lambda x, w, b: F.prelu(x + b, w), (X.T[:4], W[:4], B[:4])),
    "reduce_sum_squared": (ops.reduce_sum_squared, lambda x, *a: x.square().sum(*a), (X, 1, True)),
    "reduce_sum_squared, keepdim alone": (ops.reduce_sum_squared, lambda x, k: x.square().sum(keepdim=k), (X, True)),
    "quantize_int8": (ops.quantize_int8, torch.quantize_per_tensor, (X, 0.1, 0, torch.qint8)),
    "embedding_layer_norm": (ops.embedding_layer_norm, F.embedding, (torch.arange(4), X, None, None, 2.0, False)),
}


@pytest.mark.parametrize("name", TORCH_ORDER)
def test_as_torch_or_refused(compiled, name):
    ours, theirs, arguments = TORCH_ORDER[name]
    try:
        found = ours(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        assert re.search(r"kfconvert|positional arguments", str(error)) and "\n" not in str(error)
    else:
        torch.testing.assert_close(found, theirs(*arguments))


def test_the_documents_order_of_rms_norm_gelu(compiled):
    x, weight = torch.randn(3, 4, 6), torch.rand(4, 6)
    want = F.gelu(F.rms_norm(x, (4, 6), weight, 1e-3))
    for found in (
        ops.rms_norm_gelu(x, weight, 1e-3),
        ops.rms_norm_gelu(x, weight, eps=1e-3),
        ops.rms_norm_gelu(x, weight=weight, eps=1e-3),
        ops.rms_norm_gelu(x, (4, 6), weight, 1e-3),
        ops.rms_norm_gelu(x, normalized_shape=(4, 6), weight=weight, eps=1e-3),
    ):
        torch.testing.assert_close(found, want)
    for arguments, options, match in (
        ((x, weight, weight), {}, "weight must be given once"),
        ((x, weight, 1e-3, 1e-3), {}, "weight must be given once"),
        ((x,), {}, "normalized_shape or weight must be given"),
        ((x, None, 1e-3), {}, "weight must be a tensor, got float"),
        ((x, (4, 6), 1e-3), {}, "weight must be a tensor, got float"),
    ):
        with pytest.raises(TypeError, match=match) as error:
            ops.rms_norm_gelu(*arguments, **options)
        assert "\n" not in str(error.value)


def test_old_orders_without_all_tensors_are_refused(compiled):
    """The order of F.batch_norm with its defaults, which these had once."""
    for arguments, options in (((X, MEAN, VAR), {}), ((X, MEAN, VAR), {"training": True})):
        with pytest.raises(TypeError, match="missing 2 required positional arguments"):
            ops.batch_norm_relu(*arguments, **options)
    for sixth in (1e-5, 0.1):
        with pytest.raises(TypeError, match="training must be True or False, got float"):
            ops.batch_norm_relu(X, W, B, MEAN, VAR, sixth)
