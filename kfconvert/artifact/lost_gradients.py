"""Detects whether a forward has gradients that an exported program lacks.

A graph is traced with gradients disabled. It has the forward operators of a ``torch.autograd.Function``, but not its
backward, and no trace of ``torch.no_grad()``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..accuracy import with_gradients
from ..inputs import ExampleCall
from ..runtime import autograd_nodes, originals


def loses_gradients(model: nn.Module, call: ExampleCall) -> bool:
    """Whether the original forward of ``model`` computes with tensors that require gradients in ``torch.no_grad()`` or
    in a ``torch.autograd.Function``, or raises an error with gradients."""
    try:
        with originals(), with_gradients(), _Disabled() as disabled:
            given = call.map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(_is_differentiable(tensor)))
            outputs = given(model)
    except Exception:  # gradients may be the reason for any error
        return True
    nodes = autograd_nodes(output.grad_fn for output in _tensors(outputs))
    return disabled.met or any(map(_is_function, nodes))


class _Disabled(TorchFunctionMode):
    """Context manager whose ``met`` is whether an operator got a tensor that requires a gradient while gradients were
    disabled."""

    met = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        if not torch.is_grad_enabled() and any(map(_is_differentiable, _tensors(outputs))):
            self.met = self.met or any(tensor.requires_grad for tensor in _tensors((args, kwargs)))
        return outputs


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_function(node: Any) -> bool:
    """Whether ``node`` of autograd's graph belongs to a ``torch.autograd.Function``, and not to an operator with
    ``torch.library.register_autograd``, which a captured graph contains."""
    if not isinstance(node, BackwardCFunction):
        return False
    own: Any = type(node)
    return own._forward_cls.__module__ != "torch._library.autograd"
