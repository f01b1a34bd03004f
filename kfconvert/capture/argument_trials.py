"""Trial runs with tensors of other memory layouts and autograd properties, which no graph records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..accuracy import are_close, model_outputs, with_gradients
from ..inputs import ExampleCall, bounded_lookups
from ..region import CaptureError, Region
from ..torch_state import is_dense, is_transformed
from .trial_runs import TOLERANCES, Trial, called_by_names

_SPARE = 3  # elements before those of a tensor


def check_arguments(model: nn.Module, region: Region, run: Callable[..., Any], seen: Trial | None) -> None:
    """Compare ``run``, the graph of ``region``, with ``model`` for arguments of other memory layouts and classes. If
    only the outputs of ``model`` depend on the layouts, later calls must have those of the example.

    Args:
        seen: a call of ``model`` with plain arguments.

    Raises:
        CaptureError: only the outputs of ``model`` depend on the classes, or on gradients.
    """
    if seen is None or region.is_random or region.has_effects or region.has_caches or region.communicates:
        return
    with with_gradients():
        outputs = _outputs(
            region, model, [_as_parameter(leaf) if isinstance(leaf, Tensor) else leaf for leaf in seen.leaves]
        )
    if outputs is not None and not are_close(seen.outputs, [_detached(each) for each in outputs], TOLERANCES):
        raise CaptureError("its outputs depend on gradients or on the class of its arguments")
    given = [_relaid(leaf) if isinstance(leaf, Tensor) else leaf for leaf in seen.leaves]
    outputs = _outputs(region, model, given)
    if outputs is None or not are_close(seen.outputs, outputs, TOLERANCES):
        # A graph may do the same: it has the model's views, and operators that read the memory.
        others = _outputs(region, called_by_names(region, run), given)
        if (outputs is None) != (others is None) or (outputs and others and not are_close(outputs, others, TOLERANCES)):
            region.has_fixed_layouts = True


def reads_layout(model: nn.Module, modules: Iterable[nn.Module], calls: Iterable[ExampleCall]) -> bool:
    """Return whether the outputs of ``model`` for ``calls`` depend on the memory layout of the outputs of these
    submodules."""
    modules = list(modules)
    for call in calls if modules else ():
        with ExitStack() as stack:
            try:
                expected = model_outputs(model, call.args, call.kwargs, call.method)
            except Exception:  # a model that has changed since
                return True
            for module in modules:
                handle = module.register_forward_hook(lambda *given: pytree.tree_map_only(Tensor, _relaid, given[2]))
                stack.callback(handle.remove)
            try:
                both = expected, model_outputs(model, call.args, call.kwargs, call.method)
                ours, theirs = ([t for t in pytree.tree_leaves(each) if isinstance(t, Tensor)] for each in both)
                if not are_close(ours, theirs, TOLERANCES):
                    return True
            except Exception:  # such as a view of what is no longer contiguous
                return True
    return False


def _outputs(region: Region, run: Callable[..., Any], leaves: list[Any]) -> list[Any] | None:
    try:
        with bounded_lookups(leaves):
            return region.flat_outputs(run, leaves)[0]
    except Exception:  # the model's own code may raise anything
        return None


def _as_parameter(leaf: Tensor) -> Tensor:
    """A copy whose class, ``requires_grad`` and ``grad`` differ from a plain tensor's, if it can have gradients."""
    copied = leaf.detach().clone()
    if not (copied.is_floating_point() or copied.is_complex()) or type(leaf) is not Tensor:
        return copied
    parameter = nn.Parameter(copied)
    parameter.grad = torch.zeros_like(copied)
    return parameter


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _relaid(tensor: Tensor) -> Tensor:
    """A tensor with the same elements, in another order in memory and with gaps."""
    if not is_dense(tensor) or is_transformed(tensor) or type(tensor) is not Tensor:
        return tensor
    memory = tensor.new_zeros(_SPARE + 2 * tensor.numel())[_SPARE:].view(*reversed(tensor.shape), 2)[..., 0]
    return memory.permute(tuple(reversed(range(tensor.dim())))).copy_(tensor)
