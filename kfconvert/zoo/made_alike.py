"""Whether two models were made alike: all that decides what they compute, but the values of their weights."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.Size)
# Where a model stands rather than what it is, and what a conversion and a load leave in modules.
_OF_THE_PLACE = frozenset(("training", "forward", "kfconvert_info", "kfconvert_refresh", "__getstate__"))


def is_made_alike(model: nn.Module, other: nn.Module) -> bool:
    """Whether both have the same classes of modules by the same names, with attributes, parameters and buffers of the
    same kinds and sizes, and plain attributes and functions that are the same."""
    ours, theirs = dict(model.named_modules()), dict(other.named_modules())
    return ours.keys() == theirs.keys() and all(_is_alike(ours[name], theirs[name]) for name in ours)


def _is_alike(module: nn.Module, other: nn.Module) -> bool:
    if type(module) is not type(other):
        return False
    for kind in ("_parameters", "_buffers"):
        ours, theirs = vars(module)[kind], vars(other)[kind]
        if {name: _outline(t) for name, t in ours.items()} != {name: _outline(t) for name, t in theirs.items()}:
            return False
    if any(hooks for name, hooks in vars(module).items() if name.endswith("_hooks")):
        return False
    ours, theirs = _attributes(module), _attributes(other)
    return ours.keys() == theirs.keys() and all(_is_same(ours[name], theirs[name]) for name in ours)


def _outline(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.shape


def _attributes(module: nn.Module) -> dict[str, Any]:
    found = {name: value for name, value in vars(module).items() if name not in _OF_THE_PLACE}
    return {name: value for name, value in found.items() if not name.startswith("_") and not name.endswith("_hooks")}


def _is_same(value: Any, other: Any) -> bool:
    if type(value) is not type(other):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(_is_same(value[key], other[key]) for key in value)
    if isinstance(value, types.FunctionType):
        return value is other
    return not isinstance(value, _PLAIN) or value == other or value != value
