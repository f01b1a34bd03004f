"""Calls of every public operator in float64, with what else their arguments may be, and what such a call computes."""

import inspect
from contextlib import contextmanager
from itertools import combinations

import pytest
import torch
from support import selection
from test_arguments import functions, valid

from kfconvert import extension, ops

# What else is tried for a parameter, beside None where it may be that; a function makes it from the call.
OTHERS = {
    "activation": list(ops.ACTIVATIONS),
    "crop": [(1, 2, 3, 4)],
    "dilation": [2],
    "dim": [0],
    "dropout_p": [],  # plain ATen draws others; gelu_dropout and bias_dropout_add have the operator
    "dtype": [torch.float64],
    "eps": [0.3],
    "flip": [True],
    "groups": [],  # needs other weights: "groups" below
    "ignore_index": [3],
    "interleaved": [True],
    "is_causal": [True],
    "keepdim": [True],
    "label_smoothing": [0.3],
    "mask": [torch.arange(33) % 3 > 0],
    "mean": [(0.3, 0.4, 0.6), torch.tensor((0.3, 0.4, 0.6))],
    "memory_format": [torch.channels_last],
    "momentum": [0.3],
    "negative_slope": [0.2],
    "normalized_shape": [],  # needs other weights: "two dimensions" below
    "num_groups": [2],
    "offset": [1.0],
    "p": [0.0, 0.3],
    "padding": [1],
    "reduction": ["none", "sum"],
    "residual": lambda function, given: [torch.randn_like(first(function(**given)))],
    "return_sum": [True],
    "scale": [0.7],
    "std": [(0.3, 0.4, 0.6), torch.tensor((0.3, 0.4, 0.6))],
    "stride": [2],
    "token_type_ids": lambda _, given: [torch.ones_like(given["ids"])],
    "training": [False, True],
    "zero_point": [5],
}
t = torch.randn
NORMED = {"x": t(2, 5, 33), "normalized_shape": 33, "residual": t(5, 33)}
# Calls that no single change of those in operator_arguments makes: name -> (public function, arguments).
MORE = {
    "broadcast": ("add_relu", {"x": t(5, 1), "y": t(1, 33)}),
    "dense, not contiguous": ("mul_tanh", {"x": t(33, 5).t(), "y": t(33, 5).t()}),
    "groups": ("conv_act", {"x": t(2, 4, 8, 8), "weight": t(6, 2, 3, 3), "bias": t(6), "groups": 2}),
    "ignored rows": ("cross_entropy", {"x": t(4, 9), "target": torch.tensor([1, -100, 8, 0]), "label_smoothing": 0.2}),
    "reduced twice": ("reduce_sum_squared", {"x": t(3, 4, 5), "dim": (1, 2)}),
    "shared residual": ("layer_norm_act", NORMED),
    "shared residual, RMS": ("rms_norm_act", NORMED),
    "two dimensions": ("layer_norm_act", {"x": t(4, 3, 5), "normalized_shape": (3, 5), "weight": t(3, 5)}),
}
# Which have no gradient.
STATISTICS = {"mean", "variance", "running_mean", "running_var", "std"}
# Tensors without a name go to torch's operators only.
NAMES = [name for name, f in functions().items() if "*tensors" not in str(inspect.signature(f))] + [*MORE]


def first(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


def wide(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def base(name):
    """(the public function, its arguments by name in float64)"""
    if name in MORE:
        function, given = functions()[MORE[name][0]], MORE[name][1]
    else:
        function = functions()[name]
        given = dict(zip(inspect.signature(function).parameters, valid(name)))
    return function, {key: wide(value) for key, value in given.items()}


def changes(function, given):
    """(parameter, another value than the one in ``given``)"""
    for name, parameter in inspect.signature(function).parameters.items():
        value = given.get(name, parameter.default)
        if isinstance(value, torch.Tensor):
            if parameter.default is None:
                yield name, None
        elif parameter.annotation is not torch.Tensor:
            assert name in OTHERS or parameter.default is None, f"say in OTHERS what to try for {name}"
            others = OTHERS.get(name, ())
            for other in others(function, given) if callable(others) else others:
                yield name, wide(other)


def variants(function, given):
    """``given``, and with every change and every pair of changes with which plain ATen takes it.

    A short run has pairs with two activations only.
    """
    found = list(changes(function, given))
    alone = () if selection.EXHAUSTIVE else set(ops.ACTIVATIONS) - {"gelu", "leaky_relu"}
    paired = [(name, value) for name, value in found if name != "activation" or value not in alone]
    pairs = [pair for pair in combinations(paired, 2) if pair[0][0] != pair[1][0]]
    yield given
    changed = (given | dict(some) for some in (*((change,) for change in found), *pairs))
    yield from (arguments for arguments in changed if is_valid(function, arguments))


def is_valid(function, given):
    try:
        with plain_aten():
            function(**given)
    except (IndexError, RuntimeError, ValueError):
        return False
    return True


@contextmanager
def plain_aten():
    """Within the block the public functions are their definitions, which autograd differentiates by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "EXTENSION_LOADED", False)
        yield


def results(function, given):
    """(outputs, gradients of the floating arguments by name) of a sum in which every element has its own weight."""
    torch.manual_seed(1)
    leaves = {
        name: value.clone().requires_grad_()
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name not in STATISTICS
    }
    outputs = function(**given | leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    recorded = [y for y in outputs if y.requires_grad]
    if not (recorded and torch.is_grad_enabled()):
        return outputs, {}
    total = sum((y * torch.linspace(0.5, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum() for y in recorded)
    return outputs, dict(zip(leaves, torch.autograd.grad(total, [*leaves.values()], allow_unused=True)))


def drops(function, given):
    return "p" in inspect.signature(function).parameters and given.get("training", True) and given.get("p", 0.5) > 0
