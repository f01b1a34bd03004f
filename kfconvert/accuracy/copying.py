"""Deep copies of models that keep attributes of their parameters."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..process import shard_of


def copied_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Returns a deep copy of ``model`` that computes with its copied weights. Its parameters keep their attributes,
    such as a scale, which ``copy.deepcopy`` drops. Attributes that cannot be copied are shared with the original.

    Args:
        memo: see ``copy.deepcopy``; its entries for tensors of ``model`` also get the attributes.

    Raises:
        TypeError: a forward is a function that refers to modules or tensors of ``model``.
    """
    _check_forwards(model)
    memo = {} if memo is None else memo
    for tensor in tensors_of(model):
        # ``copy.deepcopy`` does not support distributed parameters with a storage offset.
        if shard_of(tensor) is not None and id(tensor) not in memo:
            memo[id(tensor)] = _like(tensor, tensor.detach().clone())
    for tensor in _computed(model):
        memo.setdefault(id(tensor), tensor.detach().clone())
    duplicate = copy.deepcopy(model, memo)
    for tensor in tensors_of(model):
        copied = memo.get(id(tensor))
        if isinstance(copied, Tensor) and copied is not tensor:
            for name in vars(tensor).keys() - vars(copied).keys():
                vars(copied)[name] = _copied(vars(tensor)[name], memo)
    return duplicate


def _computed(model: nn.Module) -> Iterator[Tensor]:
    """Yields computed tensors among the attributes of modules, such as weights that hooks of
    ``torch.nn.utils.weight_norm`` recompute in each call. ``copy.deepcopy`` does not support them."""
    held = (value for module in model.modules() for value in vars(module).values())
    yield from (value for value in held if isinstance(value, Tensor) and not value.is_leaf)


def _like(tensor: Tensor, copied: Tensor) -> Tensor:
    """Returns ``copied``, as a parameter if ``tensor`` is one."""
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _check_forwards(model: nn.Module) -> None:
    """Raises TypeError if a function that was assigned as a forward refers to modules or tensors of ``model``.
    ``copy.deepcopy`` does not copy functions, so the copy would compute with the weights of ``model``."""
    held = {id(each) for each in (*model.modules(), *tensors_of(model))}
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, types.FunctionType) and _refers_to(forward, held, set()):
            raise TypeError(f"the forward of {path or 'the model'} is a function that refers to modules of the model")


def _refers_to(value: Any, held: set[int], seen: set[int]) -> bool:
    """Whether a function refers to one of the objects ``held`` in its closure or defaults, also through functions."""
    if isinstance(value, types.MethodType):
        value = value.__self__
    if id(value) in held or not isinstance(value, types.FunctionType) or id(value) in seen:
        return id(value) in held
    seen.add(id(value))
    found = [*inspect.getclosurevars(value).nonlocals.values(), *(value.__defaults__ or ())]
    return any(_refers_to(each, held, seen) for each in (*found, *(value.__kwdefaults__ or {}).values()))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # such as a process group
        return value


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Returns the parameters and buffers of ``model``."""
    yield from model.parameters()
    yield from model.buffers()
