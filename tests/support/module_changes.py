"""Changes of modules: parameters and buffers of another kind, structure, classes and forwards."""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from .changes import Subject, Undo, anywhere, assigned, assigned_items, change, having, inner, noise, of, scaled_outputs

# Parameters and buffers of another kind


class Doubled(Tensor):
    """A tensor with which every function gives twice what it gives with a plain one."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        if function.__name__ not in _DOUBLED or not result.is_floating_point():
            return result
        with torch._C.DisableTorchFunctionSubclass():
            return result.as_subclass(Tensor) * 2

    def new_empty(self, *args: Any, **kwargs: Any) -> Tensor:
        return super().new_empty(*args, **kwargs).as_subclass(Doubled)  # for deep copies


_DOUBLED = ("linear", "layer_norm", "batch_norm", "conv2d", "conv1d", "embedding", "mul", "rms_norm")


def _doubled(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().as_subclass(Doubled)


@change(having("weight"))
def parameter_of_a_subclass(subject: Subject, module: nn.Module) -> Undo:
    return assigned(module, "weight", nn.Parameter(_doubled(module.weight)))


@change(having("bias"))
def no_bias(subject: Subject, module: nn.Module) -> Undo:
    return assigned(module, "bias", None)


@change(lambda model: [m for m in of(nn.Linear, nn.Conv1d, nn.Conv2d)(model) if m.bias is None])
def a_bias_where_there_was_none(subject: Subject, module: nn.Module) -> Undo:
    return assigned(module, "bias", nn.Parameter(noise(module.weight.flatten(1)[:, 0]) + 1))


@change(having("running_mean"))
def no_statistics(subject: Subject, norm: nn.Module) -> Undo:
    before = norm.running_mean, norm.running_var
    norm.running_mean = norm.running_var = None

    def undo() -> None:
        norm.running_mean, norm.running_var = before

    return undo


@change(lambda model: [m for m in of(nn.Linear)(model) if m.bias is not None])
def a_bias_that_broadcasts(subject: Subject, linear: nn.Linear) -> Undo:
    return assigned(linear, "bias", nn.Parameter(torch.ones(1, dtype=linear.bias.dtype)))


def _alike(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Pairs of modules whose weights have one shape."""
    modules = [m for m in having("weight")(model) if isinstance(m.weight, nn.Parameter)]
    pairs = [(a, b) for a in modules for b in modules if a.weight is not b.weight and type(a) is type(b)]
    return [(a, b) for a, b in pairs if a.weight.shape == b.weight.shape and a.weight.dtype is b.weight.dtype]


@change(_alike, returns=False, visible=False)
def tied(subject: Subject, pair: tuple[nn.Module, nn.Module]) -> Undo:
    undo = assigned(pair[0], "weight", pair[1].weight)
    torch.no_grad()(pair[0].weight.mul_)(-1.5)
    return undo


@change(_alike, visible=False)
def swapped_parameters(subject: Subject, pair: tuple[nn.Module, nn.Module]) -> Undo:
    def swap() -> None:
        pair[0].weight, pair[1].weight = pair[1].weight, pair[0].weight

    swap()
    return swap


def _tied(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    modules = having("weight")(model)
    return [(a, b) for a in modules for b in modules if a is not b and a.weight is b.weight]


@change(_tied)
def untied(subject: Subject, pair: tuple[nn.Module, nn.Module]) -> Undo:
    return assigned(pair[0], "weight", nn.Parameter(noise(pair[0].weight)))


# Parametrizations, and what removes a parameter from its place


class Negative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


@change(having("weight"), returns=False)
def parametrized(subject: Subject, module: nn.Module) -> Undo:
    parametrize.register_parametrization(module, "weight", Negative())
    return lambda: parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)


@change(of(nn.Linear, nn.Conv1d, nn.Conv2d), returns=False)
def older_weight_norm(subject: Subject, module: nn.Module) -> Undo:
    nn.utils.weight_norm(module)
    torch.no_grad()(module.weight_g.mul_)(3)


@change(of(nn.Linear, nn.Conv1d, nn.Conv2d), returns=False)
def pruned_for_good(subject: Subject, module: nn.Module) -> Undo:
    prune.random_unstructured(module, "weight", 0.5)
    prune.remove(module, "weight")


# Structure


def _children(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """(module, name of a child) for the children that a forward calls."""
    idle = (nn.ModuleList, nn.ModuleDict, nn.Dropout, nn.Identity)
    return [(m, name) for m in model.modules() for name, child in m._modules.items()
            if child is not None and not isinstance(child, idle)]  # fmt: skip


class Around(nn.Module):
    """Calls the module that it holds."""

    def __init__(self, inside: nn.Module):
        super().__init__()
        self.inside = inside

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled_outputs(self.inside(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["inside"], name)


@change(_children)
def wrapped(subject: Subject, place: tuple[nn.Module, str]) -> Undo:
    """A child with something around it, as adapters do."""
    parent, name = place
    return assigned(parent, name, Around(parent._modules[name]).train(parent.training))


@change(lambda model: [(m, n) for m, n in _children(model) if isinstance(m._modules[n], (nn.Linear, nn.GELU))])
def replaced(subject: Subject, place: tuple[nn.Module, str]) -> Undo:
    parent, name = place
    child = parent._modules[name]
    other = nn.Linear(child.in_features, child.out_features).to(child.weight) if isinstance(child, nn.Linear) \
        else nn.Softplus()  # fmt: skip
    return assigned(parent, name, other.train(parent.training))


@change(of(nn.Sequential))
def longer_sequence(subject: Subject, sequence: nn.Sequential) -> Undo:
    sequence.append(nn.Tanh())
    return lambda: sequence.pop(-1)


@change(of(nn.Sequential), visible=False)
def sequence_in_another_order(subject: Subject, sequence: nn.Sequential) -> Undo:
    """The same children under the same names: only the order of the dict is another."""
    names = list(sequence._modules)

    def order(names: list[str]) -> None:
        for name in names:
            sequence._modules[name] = sequence._modules.pop(name)

    order([*names[1:], names[0]])
    return lambda: order(names)


@change(lambda model: [m for m in of(nn.ModuleList)(model) if len(m) > 1], visible=False)
def list_in_another_order(subject: Subject, modules: nn.ModuleList) -> Undo:
    def swap() -> None:
        modules[0], modules[1] = modules[1], modules[0]

    swap()
    return swap


@change(_children)
def a_removed_child(subject: Subject, place: tuple[nn.Module, str]) -> Undo:
    """The original raises from then on."""
    parent, name = place
    child, order = parent._modules[name], list(parent._modules)

    def undo() -> None:
        parent._modules[name] = child
        for each in order:
            parent._modules[each] = parent._modules.pop(each)

    delattr(parent, name)
    return undo


@change(inner, visible=False)
def an_unused_child(subject: Subject, module: nn.Module) -> Undo:
    module.add_module("unused_child", nn.Linear(2, 2))
    return lambda: delattr(module, "unused_child")


def _with(store: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    return type(store)({**store, key: value})


@change(having("weight"))
def another_dict_of_parameters(subject: Subject, module: nn.Module) -> Undo:
    """As libraries do that call a module with parameters of their own."""
    return assigned_items(
        vars(module), "_parameters", _with(module._parameters, "weight", nn.Parameter(noise(module.weight)))
    )


@change(of(nn.Sequential))
def another_dict_of_modules(subject: Subject, module: nn.Module) -> Undo:
    first = next(iter(module._modules))
    return assigned_items(vars(module), "_modules", _with(module._modules, first, nn.Tanh()))


# Classes and forwards


@cache
def _subclass(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled_outputs(kind.forward(self, *args, **kwargs))

    return type(f"Scaled{kind.__name__}", (kind,), {"forward": forward})


@change(of(nn.Linear, nn.LayerNorm, nn.modules.batchnorm._BatchNorm), visible=False)
def train_mode_of_a_part(subject: Subject, module: nn.Module) -> Undo:
    mode = module.training
    module.train()
    return lambda: module.train(mode)


@change(inner)
def another_class(subject: Subject, module: nn.Module) -> Undo:
    before, module.__class__ = module.__class__, _subclass(type(module))
    return lambda: setattr(module, "__class__", before)


@change(anywhere, visible=False)
def another_class_of_the_model(subject: Subject, model: nn.Module) -> Undo:
    before, model.__class__ = model.__class__, _subclass(type(model))
    return lambda: setattr(model, "__class__", before)


@change(inner)
def forward_of_the_instance(subject: Subject, module: nn.Module) -> Undo:
    """Patched by somebody who calls the forward that was there before."""
    before = vars(module).get("forward")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return scaled_outputs(before(*args, **kwargs) if before else type(self).forward(self, *args, **kwargs))

    module.forward = types.MethodType(forward, module)
    return lambda: setattr(module, "forward", before) if before else delattr(module, "forward")
