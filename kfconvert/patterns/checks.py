"""Conditions that the refusals of several patterns share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..graph import is_weight, module_path

_REMEDY = "torch.nn.utils.parametrize.remove_parametrizations"
FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def traced(node: fx.Node) -> Tensor:
    """Returns the fake tensor that tracing computed for ``node``, with its shape, dtype and device."""
    return node.meta["val"]


def weights_refusal(**weights: Any) -> str | None:
    """Returns None if each named value is absent or a tensor of the model, else the reason."""
    for name, node in weights.items():
        if node is not None and not is_weight(node):
            _, _, of_parametrization = f".{module_path(node)}".partition(".parametrizations.")
            tensor = of_parametrization.partition(".")[0]
            remedy = f'; {_REMEDY}(module, "{tensor}") makes it one' if tensor else ""
            return f"the {name} is computed in the forward, not a parameter of the model{remedy}"
    return None


def dtype_refusal(*nodes: fx.Node | None) -> str | None:
    """Returns None if all tensors have the same floating-point dtype with fused kernels."""
    dtypes = {traced(node).dtype for node in nodes if node is not None}
    if len(dtypes) > 1:
        return f"mixed dtypes {', '.join(sorted(map(str, dtypes)))}"
    dtype = dtypes.pop()
    return None if dtype in FLOATING else f"dtype {dtype} has no fused kernel"


def residual_refusal(x: Any, residual: Any, total: fx.Node, normalized: int) -> str | None:
    """Returns None if ``total`` = x + residual is the sum before a norm over the last ``normalized`` dimensions."""
    if not (isinstance(x, fx.Node) and isinstance(residual, fx.Node)):
        return "a constant is added, not a residual"
    if not same_shape(x, total) or not repeats_over(residual, x, normalized):
        return "the residual is broadcast over dimensions that are not leading"
    return None


def same_shape(left: fx.Node, right: fx.Node) -> bool:
    """Whether two traced values have the same sizes for every value of the free sizes."""
    return sizes(left) == sizes(right)


def repeats_over(small: fx.Node, large: fx.Node, least: int) -> bool:
    """Whether ``small`` has the trailing sizes of ``large``, at least ``least`` of them, and repeats over the rest."""
    small_sizes, large_sizes = sizes(small), sizes(large)
    while small_sizes and small_sizes[0] == "1":
        small_sizes = small_sizes[1:]
    count = len(small_sizes)
    return least <= count <= len(large_sizes) and small_sizes == large_sizes[len(large_sizes) - count :]


def sizes(node: fx.Node) -> list[str]:
    """Returns sizes as text, because comparing symbolic sizes adds guards to the trace; empty for a number."""
    value = traced(node)
    return [str(size) for size in value.shape] if isinstance(value, Tensor) else ["a number"]


def linear_refusal(x: fx.Node, weight: fx.Node, bias: fx.Node | None, transposed: bool = False) -> str | None:
    """Returns the reason why a linear layer of ``x`` must not be fused, or None. All linear patterns use it."""
    unfit = weights_refusal(weight=weight, bias=bias) or dtype_refusal(x, weight, bias)
    if unfit is not None:
        return unfit
    shape = traced(weight).shape
    if len(shape) != 2:
        return f"the weight has {len(shape)} dimensions, not 2"
    features = shape[1 if transposed else 0]
    if bias is not None and traced(bias).shape != (features,):
        return f"the bias of shape {tuple(traced(bias).shape)} is broadcast over {features} features"
    return None
