"""Traces batch norms in inference as a custom operator. For PyTorch's operator, the tracer computes each result from a
dozen decomposed operators, which takes half of the tracing time of a convolutional model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ..graph import aten

# An internal operator, which exists in a graph only during its construction.
_LIBRARY = torch.library.Library("kfconvert_traced", "DEF")
_LIBRARY.define(
    "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor running_mean, Tensor running_var, "
    "float momentum, float eps, bool cudnn_enabled) -> Tensor"
)
torch.library.register_fake("kfconvert_traced::batch_norm", lambda x, *rest: torch.empty_like(x), lib=_LIBRARY)
_TRACED = torch.ops.kfconvert_traced.batch_norm.default
_SIGNATURE = inspect.signature(F.batch_norm)


class QuickBatchNorms(TorchFunctionMode):
    """Mode that traces batch norms in inference as the operator that ``restore_batch_norms`` replaces."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            given = _SIGNATURE.bind(*args, **kwargs)
            given.apply_defaults()
            x, mean, variance, weight, bias, training, momentum, eps = given.args
            if not training and mean is not None and variance is not None and _fits(x, mean, variance, weight, bias):
                return _TRACED(x, weight, bias, mean, variance, momentum, eps, torch.backends.cudnn.enabled)
        return func(*args, **kwargs)


def _fits(x: Tensor, *of_channels: Tensor | None) -> bool:
    """Whether PyTorch accepts these tensors without a cast. PyTorch's operator handles others, with an error or a
    cast."""
    if x.dim() < 2 or torch.is_autocast_enabled(x.device.type):
        return False
    return all(tensor is None or tensor.shape == x.shape[1:2] for tensor in of_channels)


def restore_batch_norms(graph: fx.Graph) -> None:
    """Restores PyTorch's operator in ``graph``."""
    for node in graph.nodes:
        if is_traced_batch_norm(node):
            node.target = aten.batch_norm.default
            node.args = (*node.args[:5], False, *node.args[5:])


def is_traced_batch_norm(node: fx.Node) -> bool:
    return node.target is _TRACED
