"""Changes beside a model's own state: hooks, modes of torch, and the classes and functions that forwards read."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as modules
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama import modeling_llama

from . import stateful_models
from .changes import Subject, Undo, anywhere, change, inner, layers, matrices, scaled_outputs

# Hooks


def _forward_hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return scaled_outputs(outputs) if isinstance(module, _HOOKED) else None


def _forward_pre_hook(module: nn.Module, inputs: Any) -> Any:
    return scaled_outputs(inputs) if isinstance(module, _HOOKED) else None


def _gradient_hook(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return scaled_outputs(inputs) if isinstance(module, _HOOKED) else None


def _gradient_pre_hook(module: nn.Module, outputs: Any) -> Any:
    return scaled_outputs(outputs) if isinstance(module, _HOOKED) else None


# What global hooks do something to: modules that one forward calls with tensors.
_HOOKED = (nn.Linear, nn.Conv2d, nn.GELU)

_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": lambda m: m.register_forward_hook(lambda m, i, o: scaled_outputs(o)),
    "forward pre-hook": lambda m: m.register_forward_pre_hook(lambda m, i: scaled_outputs(i)),
}
_BACKWARD_HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "full backward hook": lambda m: m.register_full_backward_hook(lambda m, i, o: scaled_outputs(i)),
    "full backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda m, o: scaled_outputs(o)),
}
_GLOBAL_HOOKS: dict[str, tuple[Callable, Callable]] = {
    "global forward hook": (modules.register_module_forward_hook, _forward_hook),
    "global forward pre-hook": (modules.register_module_forward_pre_hook, _forward_pre_hook),
    "global full backward hook": (modules.register_module_full_backward_hook, _gradient_hook),
    "global full backward pre-hook": (modules.register_module_full_backward_pre_hook, _gradient_pre_hook),
}
for _name, _register in _HOOKS.items():
    for _where, _targets in (("", layers), (" of the model", anywhere)):
        change(_targets, _name + _where, visible=not _where)(
            lambda subject, module, register=_register: register(module).remove
        )
for _name, _register in _BACKWARD_HOOKS.items():
    for _where, _targets in (("", layers), (" of the model", anywhere)):
        change(_targets, _name + _where, visible=False, gradients=True)(
            lambda subject, module, register=_register: register(module).remove
        )
for _name, (_register, _hook) in _GLOBAL_HOOKS.items():
    change(anywhere, _name, process_wide=True, visible="backward" not in _name, gradients="backward" in _name)(
        lambda subject, model, register=_register, hook=_hook: register(hook).remove
    )


@change(matrices, visible=False, gradients=True)
def hook_of_a_parameter(subject: Subject, parameter: nn.Parameter) -> Undo:
    return parameter.register_hook(lambda gradient: gradient * 3).remove


# Modes

_DOUBLED = ("linear", "gelu", "silu", "relu", "layer_norm", "batch_norm", "conv2d")
_DOUBLED_OPERATORS = ("mm", "addmm", "convolution", "gelu", "native_layer_norm", "embedding")


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if getattr(function, "__name__", "") in _DOUBLED else result


class DoublingOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return scaled_outputs(result) if function.overloadpacket.__name__ in _DOUBLED_OPERATORS else result


def _refuse_two_devices() -> None:
    """torch takes one default device at a time: two of them cannot be left in any order."""
    for index in range(torch._C._len_torch_function_stack()):
        if type(torch._C._get_function_stack_at(index)) is DeviceContext:
            raise RuntimeError("there is a default device already")


def _entered(mode: Any) -> Undo:
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


def _default_device() -> Undo:
    _refuse_two_devices()
    torch.set_default_device("cpu")
    return lambda: torch.set_default_device(None)


def _device_context() -> Undo:
    _refuse_two_devices()
    return _entered(torch.device("cpu"))


mode = partial(change, anywhere, process_wide=True, threads=False)
mode("function mode")(lambda subject, model: _entered(Doubling()))
mode("dispatch mode", visible=False)(lambda subject, model: _entered(DoublingOperators()))
mode("function mode that does nothing", visible=False)(lambda subject, model: _entered(BaseTorchFunctionMode()))
mode("default device", visible=False, hits=True)(lambda subject, model: _default_device())
mode("device as a context", visible=False, hits=True)(lambda subject, model: _device_context())
mode("gradients off", visible=False, hits=True)(lambda subject, model: _entered(torch.no_grad()))

# Classes and functions


def _patched(holder: Any, name: str, value: Any) -> Undo:
    """``holder`` is a class or a Python module."""
    before = vars(holder).get(name)
    setattr(holder, name, value)
    return lambda: delattr(holder, name) if before is None else setattr(holder, name, before)


def classes(model: nn.Module) -> list[type[nn.Module]]:
    # The classes of parametrized modules are left out: each is made for one module, and not shared with the other
    # model.
    return list(dict.fromkeys(type(module) for module in inner(model) if not is_parametrized(module)))


def bases(model: nn.Module) -> list[type[nn.Module]]:
    """Classes that inner modules inherit their forwards from."""
    found = (base for kind in classes(model) for base in kind.__mro__[1:] if "forward" in vars(base))
    return list(dict.fromkeys(base for base in found if base is not nn.Module))


def _scaling(function: Callable) -> Callable:
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return scaled_outputs(function(self, *args, **kwargs))

    return forward


patch = partial(change, process_wide=True)
special = partial(patch, special=True)


@patch(classes)
def forward_of_a_class(subject: Subject, kind: type[nn.Module]) -> Undo:
    return _patched(kind, "forward", _scaling(kind.forward))


@patch(bases, visible=False)
def forward_of_a_base_class(subject: Subject, kind: type[nn.Module]) -> Undo:
    return _patched(kind, "forward", _scaling(kind.forward))


@patch(classes)
def call_of_a_class(subject: Subject, kind: type[nn.Module]) -> Undo:
    return _patched(kind, "__call__", _scaling(kind.__call__))


@patch(lambda model: [type(model)])
def forward_of_the_class_of_the_model(subject: Subject, kind: type[nn.Module]) -> Undo:
    return _patched(kind, "forward", _scaling(kind.forward))


def of_class(kind: type[nn.Module], what: Any = None) -> Callable[[nn.Module], list[Any]]:
    """``what``, by default the class, for models that have a module of the class."""
    return lambda model: [what or kind] if any(isinstance(module, kind) for module in model.modules()) else []


_KEEPING = stateful_models.Keeping
_SHIFTED = stateful_models.Shifted
_OTHERS: dict[str, tuple[Any, str, Any]] = {
    "method of a class": (_KEEPING, "helper", lambda self, x: x * 3),
    "static method of a class": (_KEEPING, "fixed", staticmethod(lambda x: x * 3)),
    "property of a class": (_KEEPING, "shift", property(lambda self: 3.0)),
    "attribute of a class": (_KEEPING, "level", 3.0),
    "function read from globals": (stateful_models, "activated", torch.tanh),
    "function that one read from globals calls": (stateful_models, "bent", torch.tanh),
    "number read from globals": (stateful_models, "FACTOR", 3.0),
    "class read from globals": (stateful_models, "Shifted", type("Other", (_SHIFTED,), {"amount": 3.0})),
    "function with a closure read from globals": (stateful_models, "scaled", stateful_models.scaled_by(5.0)),
    "function of a library": (F, "gelu", lambda x, approximate="none": torch.tanh(x)),
}
for _name, _place in _OTHERS.items():
    special(of_class(_KEEPING, _place), _name)(lambda subject, place: _patched(*place))


def _attribute_of(holder: types.FunctionType, name: str, value: Any) -> Undo:
    before = getattr(holder, name)
    setattr(holder, name, value)
    return lambda: setattr(holder, name, before)


special(of_class(_KEEPING, stateful_models.activated), "code of a function")(
    lambda subject, function: _attribute_of(function, "__code__", (lambda x: x * 3).__code__)
)
special(of_class(_KEEPING, _KEEPING.forward), "code of a forward")(
    lambda subject, function: _attribute_of(function, "__code__", (lambda self, x: x * 3).__code__)
)


@special(of_class(_KEEPING), "default dtype", visible=False)
def _default_dtype(subject: Subject, kind: Any) -> Undo:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    return lambda: torch.set_default_dtype(before)


# What libraries for large models patch


def _rotated(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return q * 1.5, k


_LLAMA: dict[str, tuple[Any, str, Any]] = {
    "apply_rotary_pos_emb": (modeling_llama, "apply_rotary_pos_emb", _rotated),
    "rotate_half": (modeling_llama, "rotate_half", lambda x: x * 0.5),
    "LlamaRMSNorm.forward": (modeling_llama.LlamaRMSNorm, "forward", lambda self, x: x * self.weight * 2),
    "LlamaMLP.forward": (modeling_llama.LlamaMLP, "forward", lambda self, x: self.down_proj(self.up_proj(x))),
}
for _name, _place in _LLAMA.items():
    special(of_class(modeling_llama.LlamaModel, _place), _name)(lambda subject, place: _patched(*place))
