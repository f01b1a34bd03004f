"""What the submodules of a model receive in a run of the model, recorded by hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .inputs import ExampleCall
from .validator import model_outputs


def record(
    model: nn.Module, call: ExampleCall, modules: Iterable[nn.Module], values: bool
) -> dict[nn.Module, ExampleCall]:
    """The first call of each of ``modules`` during ``call`` of ``model``; one that was not called is missing.

    Args:
        values: keep copies of the tensors (a later in-place write would change the tensors themselves); otherwise
            tensors on the meta device, which hold sizes, strides and dtypes only.

    Raises:
        Exception: whatever the model raises for this call.
    """
    keep = _copy if values else _outline
    calls: dict[nn.Module, ExampleCall] = {}
    handles = [module.register_forward_pre_hook(_keeper(calls, keep), with_kwargs=True) for module in modules]
    try:
        model_outputs(model, call.args, call.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _keeper(calls: dict[nn.Module, ExampleCall], keep: Callable[[Tensor], Tensor]) -> Callable[..., None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in calls:
            calls[module] = ExampleCall(args, kwargs).map_tensors(keep)

    return hook


def _copy(tensor: Tensor) -> Tensor:
    """A copy in the same layout; only a stride of 0 (an expanded tensor) is not kept."""
    return tensor.detach().clone()


def _outline(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def sizes(leaves: list[Any]) -> list[tuple[int, ...] | None]:
    """The shape of each tensor among ``leaves``, None for others."""
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]


def opaque_argument(call: ExampleCall) -> type | None:
    """The class of the first argument that is no tensor, number, string or the like, in tuples, lists and dicts."""
    kinds = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    return next((type(leaf) for leaf in leaves if not isinstance(leaf, kinds)), None)
