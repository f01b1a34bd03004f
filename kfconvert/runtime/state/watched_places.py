"""The places in a model that its programs rely on, as entries of a ``Watch``, with the reason for each change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from ...region import Read
from .authors import is_of_project
from .configuration import names_by_class
from .contents import CHANGED, Contents, Found
from .hooks import HOOK_KINDS
from .references import OF_CONVERSION, OF_EVERY_MODULE, without_conversion
from .watch import ITEMS, MISSING, ROOT, SIZE, TYPE, Entry

# nn.Module's and this package's keys in the instance dict of a module are watched elsewhere, or not at all.
_OWN_KEYS = OF_EVERY_MODULE | OF_CONVERSION
# Library attributes that matter only in training, or only for its memory use.
_TRAINING_KEYS = frozenset(("gradient_checkpointing", "_gradient_checkpointing_func", "grad_checkpointing"))
# The tensors without data by which torch.export replaces a model's tensors.
OF_EXPORT = (FakeTensor, FunctionalTensor)
REPLACED = "a submodule or its forward was replaced after the conversion; convert it again"


def holder_of(module: nn.Module, root: nn.Module) -> Any:
    """The holder of the attributes of ``module`` in an entry; the model itself must not be kept alive."""
    return ROOT if module is root else module


def layout(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All submodules in order; a module that is registered at several places appears at each."""
    return list(model.named_modules(remove_duplicate=False))[1:]


def is_same_layout(layout: list[tuple[str, nn.Module]], other: list[tuple[str, nn.Module]]) -> bool:
    return len(layout) == len(other) and all(
        path == name and module is held for (path, module), (name, held) in zip(layout, other)
    )


def entries_of_children(module: nn.Module, model: nn.Module) -> Iterator[Entry]:
    yield holder_of(module, model), "_modules", module._modules
    yield module._modules, SIZE, len(module._modules)
    yield from ((module._modules, name, child) for name, child in module._modules.items())


def entries_of_structure(model: nn.Module) -> Iterator[Found]:
    """Entries for the classes, forwards and dicts of all modules, and for parameters and buffers that are None."""
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            # The program would not read a tensor that later replaces None.
            for key, tensor in store.items():
                if tensor is None:
                    reason = f"the parameter or buffer {key} was None at the conversion; convert it again"
                    yield (store, key, None), reason
        for kind in ("_parameters", "_buffers", *HOOK_KINDS):
            yield (holder_of(module, model), kind, vars(module)[kind]), REPLACED
        if module is not model:
            for name in ("forward", "_call_impl", "_compiled_call_impl"):
                yield (module, name, vars(module).get(name, MISSING)), REPLACED
            yield (module, TYPE, type(module)), REPLACED


def is_own_forward(held: Any, expected: Any) -> bool:
    """Whether ``held`` is the forward of a module's class on the instance, where none was expected: the state after
    code has wrapped and restored ``forward``."""
    module = getattr(held, "__self__", None)
    is_of_instance = isinstance(module, nn.Module) and vars(module).get("forward") is held
    return expected is MISSING and is_of_instance and held.__func__ is getattr(type(module), "forward", None)


def entries_of_sizes(model: nn.Module) -> Iterator[Found]:
    """Entries for the number and order of each module's parameters and buffers."""
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            yield (store, ITEMS, tuple(store)), "its parameters or buffers changed after conversion; convert it again"


def entries_of_modes(model: nn.Module, owners: bool) -> Iterator[Found]:
    """Entries for the modes of modules that hold tensors themselves (``owners``), or of all others."""
    for module in model.modules():
        if bool(module._parameters or module._buffers) is owners:
            name = "the model" if module is model else f"a module of class {type(module).__name__} inside the model"
            yield (holder_of(module, model), "training", False), f"{name} is in train mode"


def entries_of_attributes(
    model: nn.Module, reads: frozenset[Read], slots: Collection[tuple[str, str]], contents: Contents
) -> Iterator[Found]:
    # Programs read tensors among the attributes again in every call, but a tensor of several modules at one place only.
    holders = Counter(id(tensor) for module in model.modules() for tensor in _tensors(module))
    by_class = names_by_class(reads)
    for path, module in model.named_modules():
        names, own = by_class.get(type(module), set()), vars(module)
        if "__dict__" in names:
            names = names | without_conversion(own).keys()
        names = names - _unwatched(type(module))
        for key in sorted(key for key in names - (_children_of(module) - own.keys()) if not key.startswith("__")):
            value = own.get(key, MISSING)
            name = f"{path}.{key}" if path else key
            if not (isinstance(value, Tensor) and holders[id(value)] == 1 and (path, key) in slots):
                yield (holder_of(module, model), key, value), f"the attribute {name} {CHANGED}"
            # The code called hasattr() or getattr(). The class dicts are searched, as getattr would call descriptors.
            if value is MISSING and not any(key in vars(kind) for kind in type(module).__mro__):
                for store in (module._parameters, module._buffers, module._modules):
                    yield (store, key, MISSING), f"{name} was added after the conversion; convert it again"
            if isinstance(module, nn.RNNBase) and key == "_flat_weights":
                # The list holds the module's parameters, which the code only computes with: contents do not matter.
                yield (value, ITEMS, tuple(value)), f"the attribute {name} {CHANGED}"
            elif not (isinstance(value, Tensor) and (path, key) in slots):
                yield from contents.of(name, value)


def _unwatched(kind: type) -> frozenset[str]:
    """The module attributes of a class that are watched elsewhere, or not at all."""
    return _OWN_KEYS if any(is_of_project(each.__module__) for each in kind.__mro__) else _OWN_KEYS | _TRAINING_KEYS


def _children_of(module: nn.Module) -> set[str]:
    return module._modules.keys() | module._parameters.keys() | module._buffers.keys()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for store in (module._parameters, module._buffers, vars(module)):
        yield from (value for value in store.values() if isinstance(value, Tensor))


def entries_of_settings(configurations: Iterable[Any], reads: frozenset[Read], contents: Contents) -> Iterator[Found]:
    names = sorted(name for name in reads if isinstance(name, str) and name != "__dict__")
    for config in configurations:
        yield (config, TYPE, type(config)), f"the class of an object of the model {CHANGED}"
        for name in names:
            value = vars(config).get(name, MISSING)
            yield (config, name, value), f"{name} in the configuration of the model {CHANGED}"
            yield from contents.of(f"{name} in the configuration of the model", value)


def tied_places(model: nn.Module) -> list[list[tuple[dict[str, Any], str]]]:
    """The groups of places with one and the same tensor; a region reads each group at one place only."""
    groups: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    groups.setdefault(id(tensor), []).append((store, key))
    return [places for places in groups.values() if len(places) > 1]
