"""Checks whether two models are equal except for the values of their weights."""

from __future__ import annotations

import functools
import json
import types
import weakref
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..runtime import settings_of, without_conversion
from .common import ZooError

# Attributes that do not affect the computation: device and origin, entries of a conversion, notes of transformers on
# loading, and of accelerate on training, and the text that torchao assigns.
_OF_THE_PLACE = {
    "training", "_is_hf_initialized", "_commit_hash", "_name_or_path", "name_or_path", "transformers_version",
    "_compiled_call_impl", "_parameters", "_buffers", "_modules", "architectures", "model_type", "warnings_issued",
    "_original_object_hash", "vocab_size", "_is_accelerate_prepared", "require_backward_grad_sync",
    "require_forward_param_sync", "extra_repr",
}  # fmt: skip
_CALLED = (types.BuiltinFunctionType, type)
_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if "hooks" in name and isinstance(value, dict))
_MAY_BE_NONE = (type(None), bool, list, dict)
_DEPTH = 8


def is_made_alike(model: nn.Module, other: nn.Module) -> bool:
    """Whether both models have the same module names and classes, parameters and buffers of the same sizes and ties,
    and equal attributes. Attributes that cannot be compared count as different."""
    ours, theirs = dict(model.named_modules()), dict(other.named_modules())
    return (
        ours.keys() == theirs.keys()
        and _ties(model) == _ties(other, _wrappers(model))
        and all(_is_alike(ours[name], theirs[name]) for name in ours)
    )


def reproduced(
    model: nn.Module, recipe: dict[str, Any], rebuild: Callable[[dict[str, Any], bool], nn.Module]
) -> dict[str, Any] | None:
    """Returns the ``recipe`` as JSON values; None if ``rebuild`` does not make a model like ``model`` from it."""
    try:
        recipe = json.loads(json.dumps(recipe))
        with torch.device("meta"), torch.random.fork_rng(devices=()):
            again = rebuild(recipe, True)
    except (ZooError, TypeError, ValueError, RuntimeError):  # not JSON, or not buildable without data
        return None
    return recipe if is_made_alike(model, again) else None


def _wrappers(model: nn.Module) -> dict[str, int]:
    """The number of each parameter that wraps other tensors. These replace tied weights: quantization unties them."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {name: id(parameter) for name, parameter in parameters if is_traceable_wrapper_subclass(parameter)}


def _ties(model: nn.Module, wrappers: Mapping[str, int] = MappingProxyType({})) -> list[list[str]]:
    """The names of each tied parameter, after those in ``wrappers`` became other ones."""
    names: dict[tuple[int, int | None], list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault((id(parameter), wrappers.get(name)), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _is_alike(module: nn.Module, other: nn.Module) -> bool:
    if _kind(module) != _kind(other):
        return False
    for kind in ("_parameters", "_buffers"):
        ours, theirs = vars(module)[kind], vars(other)[kind]
        if {name: _outline(t) for name, t in ours.items()} != {name: _outline(t) for name, t in theirs.items()}:
            return False
    return _is_same_dict(_attributes(module), _attributes(other), 0)


def _kind(module: nn.Module) -> tuple[type, list[str]]:
    """The class of ``module`` and the names of its parametrized tensors (torch derives a class per such module)."""
    parametrized = list(module.parametrizations) if parametrize.is_parametrized(module) else []  # type: ignore[arg-type]
    return parametrize.type_before_parametrizations(module), parametrized


def _outline(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.shape


def _attributes(held: Any) -> dict[str, Any]:
    """The attributes without entries of a conversion and without empty or false private ones. Hooks, whose keys are
    numbers, become lists in their order."""
    kept = without_conversion(vars(held))
    if isinstance(held, nn.Module):
        for name in _HOOKS & kept.keys():  # torch wraps some hooks, and copies of wrappers lack attributes
            kept[name] = [getattr(hook, "hook", hook) for hook in kept[name].values()]
    found = {name: value for name, value in kept.items() if name not in _OF_THE_PLACE}
    return {name: v for name, v in found.items() if not (name.startswith("_") and type(v) in _MAY_BE_NONE and not v)}


def _is_same_dict(one: dict[Any, Any], other: dict[Any, Any], depth: int) -> bool:
    return one.keys() == other.keys() and all(_is_same(one[key], other[key], depth) for key in one)


def _bound(function: types.FunctionType) -> tuple[Any, ...]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    return function.__defaults__, function.__kwdefaults__, cells


def _is_same(value: Any, other: Any, depth: int = 0) -> bool:
    if value is other or isinstance(value, nn.Module):  # modules are compared by name
        return value is other or type(value) is type(other)
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):  # equal in JSON
        return len(value) == len(other) and all(_is_same(*pair, depth + 1) for pair in zip(value, other))
    if isinstance(value, torch.dtype) or isinstance(other, torch.dtype):  # save_pretrained stores the name
        return str(value).removeprefix("torch.") == str(other).removeprefix("torch.")
    if type(value) is not type(other) or depth > _DEPTH:
        return False
    if isinstance(value, types.FunctionType):  # each model has a new one
        return value.__code__ is other.__code__ and _is_same(_bound(value), _bound(other), depth + 1)
    if isinstance(value, _CALLED):
        return False
    if isinstance(value, weakref.ref):  # recurrent layers have these to their weights
        return _is_same(value(), other(), depth + 1)
    if isinstance(value, torch.Tensor):
        return value.shape == other.shape
    if isinstance(value, (types.MethodType, functools.partial)):
        inner = ("__func__",) if isinstance(value, types.MethodType) else ("func", "args", "keywords")
        return all(_is_same(getattr(value, name), getattr(other, name), depth + 1) for name in inner)
    if isinstance(value, dict):
        return _is_same_dict(settings_of(value), settings_of(other), depth + 1)
    if not isinstance(getattr(value, "__dict__", None), dict):
        try:
            return bool(value == other or value != value)
        except Exception:  # from a user-defined __eq__
            return False
    return _is_same_dict(_attributes(value), _attributes(other), depth + 1)
