"""Changes of plain attributes, and of what lies in lists, dicts and objects that modules hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .changes import Subject, Undo, assigned, assigned_items, change, having, of

# Attributes. Each is tried on every module that has it.

_VALUES: dict[str, Callable[[Any], Any]] = {
    "scale": lambda value: value * 3,
    "eps": lambda value: 20.0,
    "size": lambda value: (value[0] + 1, *value[1:]),
    "flag": lambda value: not value,
    "approximate": lambda value: "tanh" if value == "none" else "none",
    "activation": lambda value: torch.tanh,
    "tensor": lambda value: value * 3,
    "padding_mode": lambda value: "circular" if value == "zeros" else "zeros",
    "stride": lambda value: tuple(2 if each == 1 else 1 for each in value),
    "momentum": lambda value: 0.9,
    "normalized_shape": lambda value: value,
    "level": lambda value: value + 1,
}
_SPECIAL = ("size", "activation", "tensor", "level")
_INVISIBLE = ("approximate", "momentum", "normalized_shape", "padding_mode")


def _attribute(subject: Subject, module: nn.Module, name: str) -> Undo:
    return assigned(module, name, _VALUES[name](getattr(module, name)))


def _holding(name: str) -> Callable[[nn.Module], list[nn.Module]]:
    """Modules with an attribute that is no submodule and can be assigned."""
    return lambda model: [m for m in having(name)(model) if name not in m._modules
                          and not isinstance(getattr(type(m), name, None), property)]  # fmt: skip


for _name in _VALUES:
    change(_holding(_name), f"attribute {_name}", visible=_name not in _INVISIBLE, special=_name in _SPECIAL)(
        partial(_attribute, name=_name)
    )


@change(of(nn.LayerNorm, nn.modules.batchnorm._BatchNorm))
def eps_of_a_norm_in_its_dict(subject: Subject, norm: nn.Module) -> Undo:
    return assigned_items(vars(norm), "eps", 20.0)


@change(_holding("level"), "a class attribute is shadowed", special=True)
def _shadowed(subject: Subject, module: nn.Module) -> Undo:
    vars(module)["level"] = 5.0
    return lambda: vars(module).pop("level")


@change(having("helper"), "a method is shadowed", special=True)
def _shadowed_method(subject: Subject, module: nn.Module) -> Undo:
    return assigned(module, "helper", lambda x: x * 3)


def _configurations(model: nn.Module) -> list[Any]:
    return [model.config] if hasattr(model, "config") else []


@change(_configurations, "setting that the forward reads", visible=False)
def _setting(subject: Subject, config: Any) -> Undo:
    return assigned(config, "output_hidden_states", True)


# In place, in lists, dicts and objects that a module holds


def _item(container: Any, key: Any, value: Any) -> Undo:
    before = container[key]
    container[key] = value
    return lambda: container.__setitem__(key, before)


def _write(tensor: Tensor) -> Undo:
    before = tensor.clone()
    tensor.mul_(3)
    return lambda: tensor.copy_(before)


def _appended(factors: list) -> Undo:
    factors.append(1)
    return factors.pop


def _added(chosen: set) -> Undo:
    chosen.add("second")
    return lambda: chosen.remove("second")


_IN_PLACE: dict[str, Callable[[Any], Undo]] = {
    "item of a list": lambda m: _item(m.factors, 0, 4.0),
    "item of a list within a list": lambda m: _item(m.factors[1], 0, 4.0),
    "tensor in a list": lambda m: _item(m.factors, 2, m.factors[2] * 3),
    "write to a tensor in a list": lambda m: _write(m.factors[2]),
    "longer list": lambda m: _appended(m.factors),
    "item of a dict": lambda m: _item(m.table, "gain", 4.0),
    "item of a dict within a dict": lambda m: _item(m.table["deep"], "shift", 4.0),
    "tensor in a dict": lambda m: _item(m.table, "vector", m.table["vector"] * 3),
    "write to a tensor in a dict": lambda m: _write(m.table["vector"]),
    "larger set": lambda m: _added(m.chosen),
    "attribute of an object": lambda m: assigned(m.settings, "scale", 4.0),
    "attribute of an object within an object": lambda m: assigned(m.settings.nested, "shift", 4.0),
    "write to a tensor": lambda m: _write(m.tensor),
    "write to a buffer": lambda m: _write(m.mask),
    "a buffer where there was None": lambda m: assigned(m, "extra", torch.ones(16)),
    "a broadcast parameter": lambda m: assigned(m, "gain", nn.Parameter(torch.full((1,), 3.0))),
    "a broadcast buffer": lambda m: assigned(m, "mask", torch.full((1,), 3.0)),
    "a broadcast tensor": lambda m: assigned(m, "tensor", torch.full((5, 16), 3.0)),
    "a number in place of a tensor": lambda m: assigned(m, "tensor", 3.0),
    "a list in place of a tensor": lambda m: assigned(m, "tensor", [3.0]),
}
for _name, _change in _IN_PLACE.items():
    change(having("factors"), _name, special=True)(lambda subject, module, make=_change: make(module))


def _other_kinds(model: nn.Module) -> list[tuple[list, int]]:
    """The steps of a random model that do something with a number: (list of steps, place)."""
    return [(m.steps, i) for m in having("steps")(model) for i, s in enumerate(m.steps) if s.operation == "number"]


def _other_kind(step: Any) -> str:
    return "rsub" if step.options["kind"] != "rsub" else "square"


@change(_other_kinds)
def option_of_a_step_in_a_list(subject: Subject, place: tuple[list, int]) -> Undo:
    step = place[0][place[1]]
    return _item(step.options, "kind", _other_kind(step))


@change(_other_kinds)
def another_step_in_a_list(subject: Subject, place: tuple[list, int]) -> Undo:
    step = place[0][place[1]]
    return _item(*place, dataclasses.replace(step, options={"kind": _other_kind(step)}))
