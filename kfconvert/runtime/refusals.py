"""Changes of a frozen model that are refused where they are made."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.utils.parametrize import ParametrizationList

from .contents import OfConversion
from .frozen import Frozen
from .weak_module import WeakModule

# Every module of a frozen model, by its id, and what it was frozen by. That holds modules, which may hold the model.
_frozen: dict[int, tuple[weakref.ref[nn.Module], weakref.ref[Frozen]]] = {}


def frozen_by(module: nn.Module) -> Frozen | None:
    """What ``module`` was frozen by, None where it may change."""
    found = _frozen.get(id(module))
    return found[1]() if found is not None and found[0]() is module else None


def refuse_changes(model: nn.Module, frozen: Frozen, is_read: Callable[[type, str], bool]) -> None:
    """From now on, a FrozenError where a parameter, buffer or submodule of ``model`` or of a module within it is
    assigned or registered, and where one of these is moved, cast, loaded into or put into train mode. ``is_read``:
    whether a forward reads a method, by that name, of modules of a class, which then stays what it is."""
    _announce()
    for module in model.modules():
        _frozen[id(module)] = weakref.ref(module, partial(_forget, id(module))), weakref.ref(frozen)
        for name in _CHANGES:
            if not is_read(type(module), name):
                module.__dict__.setdefault(name, Refusal(module, frozen, name))


def allow_changes(module: nn.Module) -> None:
    """What ``refuse_changes`` has set up for ``module`` itself is undone."""
    _frozen.pop(id(module), None)
    for name in _CHANGES:
        if isinstance(module.__dict__.get(name), Refusal):
            del module.__dict__[name]


def _forget(key: int, gone: weakref.ref[nn.Module]) -> None:
    if key in _frozen and _frozen[key][0] is gone:  # else the address belongs to another module by now
        del _frozen[key]


class Refusal(OfConversion):
    """Stands as the method ``name`` in the instance dict of a module of a frozen model. Copies have their methods (see
    StateForCopies); where a class copies the instance dict itself, this is that method there."""

    def __init__(self, module: nn.Module, frozen: Frozen | None, name: str):
        self._module, self._frozen, self._name = WeakModule(module), frozen, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        if self._frozen is None:
            return getattr(type(module), self._name)(module, *args, **kwargs)
        change = _CHANGES[self._name](module, self._frozen, *args, **kwargs)
        if change is not None:
            raise self._frozen.refused(change)
        return module


def _train(module: nn.Module, frozen: Frozen, mode: bool = True) -> str | None:
    return "it is to be put into train mode" if mode else None


def _apply(module: nn.Module, frozen: Frozen, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> str | None:
    """Of ``.to()`` and its kind: a device and a dtype that the model has already are no change."""
    on_host = frozen.on_host
    tensors = [tensor for each in (module.parameters(), module.buffers()) for tensor in each]
    stay = all(fn(tensor) is tensor for tensor in tensors if on_host is None or not on_host.holds(tensor))
    return None if stay else "its tensors are to be moved or cast"


def _load_state_dict(module: nn.Module, frozen: Frozen, *args: Any, **kwargs: Any) -> str | None:
    return "weights are to be loaded into it"


_CHANGES: dict[str, Callable[..., str | None]] = {
    "train": _train,
    "_apply": _apply,
    "load_state_dict": _load_state_dict,
}
_announced = False


def _announce() -> None:
    """Be told, from the first frozen model on, of what is registered in any module."""
    global _announced
    if not _announced:
        _announced = True
        torch_module.register_module_parameter_registration_hook(_registered)
        torch_module.register_module_buffer_registration_hook(_registered)
        torch_module.register_module_module_registration_hook(_registered)


def _registered(module: nn.Module, name: str, value: Any) -> None:
    frozen = frozen_by(module)
    if frozen is not None:
        # By now torch has taken away what went by that name, and who registers one of several things may have begun.
        frozen.snapshot.put_back(name)
        raise frozen.refused(f"{name} of a {type(module).__name__} is to be assigned")
    if isinstance(module, ParametrizationList) and _frozen:
        _refuse_parametrization()


def _refuse_parametrization() -> None:
    """Before ``ParametrizationList`` writes to the tensor that it is made for, it takes over the parametrizations."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not ParametrizationList.__init__.__code__:
        frame = frame.f_back
    original = None if frame is None else frame.f_locals.get("original")
    for reference, _ in list(_frozen.values()):
        module = reference()
        frozen = None if module is None else frozen_by(module)
        if frozen is None or module is None or original is None:
            continue
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is original:
                raise frozen.refused(f"{name} of a {type(module).__name__} is to be parametrized")
