"""Records the inputs of a model's submodules in a run of the model, by hooks."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ..accuracy import model_outputs
from ..inputs import ExampleCall, is_whole
from ..region import given_as
from ..torch_state import is_dense, is_transformed


def outlines(model: nn.Module, call: ExampleCall, modules: Iterable[nn.Module]) -> dict[nn.Module, ExampleCall]:
    """Return the most frequent inputs of each of ``modules`` in ``call`` of ``model``; uncalled modules are missing.

    The tensors are on the meta device: they have only sizes, strides and dtypes.

    Raises:
        Exception: any error of the model for this call.
    """
    met: dict[nn.Module, dict[Hashable, list[ExampleCall]]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        outline = ExampleCall(args, kwargs).map_tensors(_outline)
        met.setdefault(module, {}).setdefault(kind_of(outline), []).append(outline)

    _run_once(model, call, [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules])
    return {module: max(kinds.values(), key=len)[0] for module, kinds in met.items()}


def observe(
    model: nn.Module,
    call: ExampleCall,
    modules: Iterable[nn.Module],
    like: Mapping[nn.Module, ExampleCall] = MappingProxyType({}),
) -> dict[nn.Module, ExampleCall]:
    """Return the first call of each of ``modules`` during ``call`` of ``model``, of the kind of the call in ``like`` if
    given; a module without such a call is missing. The tensors are copies, as a later write would change them.

    Raises:
        Exception: any error of the model for this call.
    """
    calls: dict[nn.Module, ExampleCall] = {}
    kinds = {module: kind_of(each) for module, each in like.items()}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received = ExampleCall(args, kwargs)
        if module not in calls and kinds.get(module) in (None, kind_of(received)):
            calls[module] = received.copied()

    _run_once(model, call, [module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules])
    return calls


def kind_of(call: ExampleCall) -> Hashable:
    """A key that is equal for calls of equal structure, numbers and flags, whose tensors have equal sizes, strides,
    dtypes and identities."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    kinds = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            kinds.append((leaf.dtype, leaf.dim() if _is_opaque(leaf) else (leaf.shape, leaf.stride())))
        else:
            kinds.append(repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf))
    return repr(spec), tuple(kinds), given_as([leaf for leaf in leaves if isinstance(leaf, Tensor)])


def _run_once(model: nn.Module, call: ExampleCall, handles: Iterable[RemovableHandle]) -> None:
    """Run the hooked model, and remove the hooks."""
    try:
        model_outputs(model, call.args, call.kwargs, call.method)
    finally:
        for handle in handles:
            handle.remove()


def around(model: nn.Module, attributes: Iterable[tuple[str, str]]) -> dict[nn.Module, str]:
    """The modules with one of the ``attributes``, given by module path and name, or with such a submodule, each with
    the dotted name of its first such attribute."""
    found: dict[nn.Module, str] = {}
    for path, name in attributes:
        pieces = path.split(".") if path else []
        for count in range(len(pieces) + 1):
            found.setdefault(model.get_submodule(".".join(pieces[:count])), ".".join((*pieces[count:], name)))
    return found


def _outline(tensor: Tensor) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter) or _is_opaque(tensor):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def sizes(leaves: list[Any]) -> list[tuple[int, ...] | None]:
    """The shape of each tensor among ``leaves``, None for others."""
    return [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]


def opaque_kind(values: Any) -> str | None:
    """Describe the first value, also in tuples, lists and dicts, that is neither a number, string or the like nor a
    tensor with a shape and its elements in memory."""
    kinds = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
    leaves = pytree.tree_leaves(values, is_leaf=is_whole)
    opaque = (leaf for leaf in leaves if not isinstance(leaf, kinds) or _is_opaque(leaf))
    return next((_in_words(leaf) for leaf in opaque), None)


def _in_words(value: Any) -> str:
    name = type(value).__name__
    if not isinstance(value, Tensor) or is_transformed(value):
        return name
    if value.is_nested or value.is_quantized:
        return f"{'nested' if value.is_nested else 'quantized'} {name}"
    return name if value.layout is torch.strided else f"{name} of layout {str(value.layout).removeprefix('torch.')}"


def _is_opaque(value: Any) -> bool:
    """Whether a tensor has no usual shape, strides or memory: a nested tensor, one within ``torch.vmap``, a quantized
    or a sparse one."""
    return isinstance(value, Tensor) and (is_transformed(value) or not is_dense(value))
