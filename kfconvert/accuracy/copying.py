"""Deep copies of models that keep attributes of their parameters."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..process import shard_of

_NOTHING = object()


def copied_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Returns a deep copy of ``model`` that computes with its copied weights. Its parameters keep their attributes,
    such as a scale, which ``copy.deepcopy`` drops. Attributes that cannot be copied are shared with the original.

    Args:
        memo: see ``copy.deepcopy``; its entries for tensors of ``model`` also get the attributes.
    """
    memo = {} if memo is None else memo
    for tensor in tensors_of(model):
        # ``copy.deepcopy`` does not support distributed parameters with a storage offset.
        if shard_of(tensor) is not None and id(tensor) not in memo:
            memo[id(tensor)] = _like(tensor, tensor.detach().clone())
    for tensor in _computed(model):
        memo.setdefault(id(tensor), tensor.detach().clone())
    duplicate = copy.deepcopy(model, memo)
    _rebind_forwards(model, memo)
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


def _rebind_forwards(model: nn.Module, memo: dict[int, Any]) -> None:
    """Rebinds forwards that were assigned to modules from modules or tensors of ``model`` in their closures to those of
    the copy. ``copy.deepcopy`` does not copy functions, so the copy would compute with the weights of ``model``."""
    for module in model.modules():
        duplicate, forward = memo.get(id(module)), vars(module).get("forward")
        if isinstance(forward, types.FunctionType) and isinstance(duplicate, nn.Module):
            vars(duplicate)["forward"] = _rebound(forward, memo, {})


def _rebound(value: Any, memo: dict[int, Any], functions: dict[int, types.FunctionType]) -> Any:
    """Returns ``value`` with the copies of ``memo``, or ``value`` if it has no copies. ``functions`` has the rebound
    functions, which may be recursive."""
    if isinstance(value, (nn.Module, Tensor)):
        return memo.get(id(value), value)
    if isinstance(value, types.MethodType):
        owner = _rebound(value.__self__, memo, functions)
        return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
    if not isinstance(value, types.FunctionType):
        return value
    if id(value) in functions:
        return functions[id(value)]
    cells, named = value.__closure__ or (), value.__kwdefaults__ or {}
    closure = tuple(types.CellType() for _ in cells)
    made = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, closure)
    functions[id(value)] = made
    held = [*map(_content, cells), *(value.__defaults__ or ()), *named.values()]
    found = [_rebound(each, memo, functions) for each in held]
    if all(before is after or (before is value and after is made) for before, after in zip(held, found)):
        functions[id(value)] = value
        return value
    for cell, content in zip(closure, found):
        if content is not _NOTHING:
            cell.cell_contents = content
    made.__defaults__ = tuple(found[len(cells) : len(found) - len(named)]) or None
    made.__kwdefaults__ = dict(zip(named, found[len(found) - len(named) :])) or None
    functools.update_wrapper(made, value)
    del vars(made)["__wrapped__"]  # else the copy references the original
    made.__dict__.update(vars(value))
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return _NOTHING


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # such as a process group
        return value


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
