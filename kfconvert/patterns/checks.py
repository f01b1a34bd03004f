"""The conditions that the refusals of several patterns share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..matcher import is_weight

FLOATING = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def traced(node: fx.Node) -> Tensor:
    """The fake tensor that tracing computed for ``node``: its shape, dtype and device."""
    return node.meta["val"]


def weights_refusal(**weights: Any) -> str | None:
    """None where each named value is absent or a tensor of the model, else which of them is computed in forward."""
    for name, node in weights.items():
        if node is not None and not is_weight(node):
            return f"the {name} is computed in the forward, not a parameter of the model"
    return None


def dtype_refusal(*nodes: fx.Node | None) -> str | None:
    """None where all tensors have one floating-point dtype that the kernels take."""
    dtypes = {traced(node).dtype for node in nodes if node is not None}
    if len(dtypes) > 1:
        return f"mixed dtypes {', '.join(sorted(map(str, dtypes)))}"
    dtype = dtypes.pop()
    return None if dtype in FLOATING else f"dtype {dtype} has no fused kernel"


def same_shape(left: fx.Node, right: fx.Node) -> bool:
    """Whether two traced values have the same sizes for every value of the free sizes."""
    return _sizes(traced(left)) == _sizes(traced(right))


def broadcasts_to(small: fx.Node, large: fx.Node) -> bool:
    """Whether ``small`` can be broadcast to the sizes of ``large`` without widening ``large``."""
    small_sizes, large_sizes = _sizes(traced(small)), _sizes(traced(large))
    tail = large_sizes[len(large_sizes) - len(small_sizes) :]
    fits = all(a in (b, "1") for a, b in zip(small_sizes, tail))
    return len(small_sizes) <= len(large_sizes) and fits


def _sizes(value: Tensor) -> list[str]:
    """Sizes as text: comparing symbolic sizes as numbers would add guards to the trace."""
    return [str(size) for size in value.shape]
