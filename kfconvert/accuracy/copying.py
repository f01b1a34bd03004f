"""Deep copies of models that keep what somebody has set on their parameters."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..process import shard_of


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
    duplicate = copy.deepcopy(model, memo)
    _rebind_forwards(model, memo)
    for tensor in tensors_of(model):
        copied = memo.get(id(tensor))
        if isinstance(copied, Tensor) and copied is not tensor:
            for name in vars(tensor).keys() - vars(copied).keys():
                vars(copied)[name] = _copied(vars(tensor)[name], memo)
    return duplicate


def _like(tensor: Tensor, copied: Tensor) -> Tensor:
    """``copied``, a parameter where ``tensor`` is one."""
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _rebind_forwards(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let a forward that somebody has put on a module, and that holds this very module in its closure, be that of the
    copy: ``copy.deepcopy`` leaves functions as they are, and the copy would compute with the weights of ``model``."""
    for module in model.modules():
        duplicate, forward = memo.get(id(module)), vars(module).get("forward")
        if not isinstance(forward, types.FunctionType) or not isinstance(duplicate, nn.Module):
            continue
        cells = forward.__closure__ or ()
        if any(_content(cell) is module for cell in cells):
            closure = tuple(types.CellType(_rebound(_content(cell), module, duplicate)) for cell in cells)
            vars(duplicate)["forward"] = _with_closure(forward, closure)


def _rebound(value: Any, module: nn.Module, duplicate: nn.Module) -> Any:
    if value is module:
        return duplicate
    if isinstance(value, types.MethodType) and value.__self__ is module:
        return types.MethodType(value.__func__, duplicate)
    return value


def _with_closure(function: types.FunctionType, closure: tuple[Any, ...]) -> types.FunctionType:
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    return made


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that has no value yet
        return None


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # such as a process group
        return value


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of ``model``."""
    yield from model.parameters()
    yield from model.buffers()
