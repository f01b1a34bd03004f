"""Deep copies of models that keep what somebody has set on their parameters."""

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
    """A deep copy of ``model``, which computes with its own weights. Its parameters keep the attributes that were set
    on them, such as a scale, which ``copy.deepcopy`` drops; one that cannot be copied is that of the original.

    Args:
        memo: as of ``copy.deepcopy``; what it has for a tensor of ``model`` gets the attributes too.
    """
    memo = {} if memo is None else memo
    for tensor in tensors_of(model):
        # Of a distributed one that does not begin where its memory begins ``copy.deepcopy`` makes nothing.
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
    """The tensors among the attributes of modules that were computed from others, such as the weights that hooks of
    ``torch.nn.utils.weight_norm`` compute anew in each call: ``copy.deepcopy`` refuses them."""
    held = (value for module in model.modules() for value in vars(module).values())
    yield from (value for value in held if isinstance(value, Tensor) and not value.is_leaf)


def _like(tensor: Tensor, copied: Tensor) -> Tensor:
    """``copied``, a parameter where ``tensor`` is one."""
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _rebind_forwards(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let forwards that somebody has put on modules, and that hold modules or tensors of ``model`` in their closures,
    hold those of the copy: ``copy.deepcopy`` leaves functions as they are, and the copy would compute with the weights
    of ``model``."""
    for module in model.modules():
        duplicate, forward = memo.get(id(module)), vars(module).get("forward")
        if isinstance(forward, types.FunctionType) and isinstance(duplicate, nn.Module):
            vars(duplicate)["forward"] = _rebound(forward, memo, {})


def _rebound(value: Any, memo: dict[int, Any], functions: dict[int, types.FunctionType]) -> Any:
    """``value`` with the copies of ``memo``; itself where nothing in it was copied. ``functions`` has what was made of
    those that were met, which may hold themselves."""
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
    del vars(made)["__wrapped__"]  # by which the copy would hold on to the original
    made.__dict__.update(vars(value))
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return _NOTHING


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # such as a process group
        return value


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of ``model``."""
    yield from model.parameters()
    yield from model.buffers()
