"""Deep copies of models that keep what somebody has set on their parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def copied_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of ``model``. Its parameters keep the attributes that were set on them, such as a scale, which
    ``copy.deepcopy`` drops; one that cannot be copied is that of the original.

    Args:
        memo: as of ``copy.deepcopy``; what it has for a tensor of ``model`` gets the attributes too.
    """
    memo = {} if memo is None else memo
    duplicate = copy.deepcopy(model, memo)
    for tensor in tensors_of(model):
        copied = memo.get(id(tensor))
        if isinstance(copied, Tensor) and copied is not tensor:
            for name in vars(tensor).keys() - vars(copied).keys():
                vars(copied)[name] = _copied(vars(tensor)[name], memo)
    return duplicate


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # such as a process group
        return value


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """The parameters and buffers of ``model``."""
    yield from model.parameters()
    yield from model.buffers()
