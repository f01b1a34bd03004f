"""Changes of a frozen model that are refused where they are made."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .contents import OfConversion
from .frozen import Frozen
from .weak_module import WeakModule

# Every module of a frozen model, by its id, and what it was frozen by.
_frozen: dict[int, tuple[weakref.ref[nn.Module], Frozen]] = {}


def frozen_by(module: nn.Module) -> Frozen | None:
    """What ``module`` was frozen by, None where it may change."""
    reference, frozen = _frozen.get(id(module), (None, None))
    return frozen if reference is not None and reference() is module else None


def refuse_changes(model: nn.Module, frozen: Frozen) -> None:
    """From now on, a FrozenError where a parameter, buffer or submodule of ``model`` or of a module within it is
    assigned or registered, and where ``model`` is moved, cast, loaded into or put into train mode."""
    _announce()
    for module in model.modules():
        _frozen[id(module)] = weakref.ref(module, partial(_forget, id(module))), frozen
    for name in _CHANGES:
        model.__dict__.setdefault(name, Refusal(model, name))


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
    """Stands as the method ``name`` in the instance dict of a frozen model. In copies, which are not frozen, it is that
    method."""

    def __init__(self, module: nn.Module, name: str):
        self._module, self._name = WeakModule(module), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        frozen = frozen_by(module)
        if frozen is not None:
            change = _CHANGES[self._name](module, frozen, *args, **kwargs)
            if change is not None:
                raise frozen.refused(change)
            return module
        return getattr(type(module), self._name)(module, *args, **kwargs)


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
        raise frozen.refused(f"{name} of a {type(module).__name__} is to be assigned")
