"""A digest of everything that traces of a model depend on: a stored graph is used where the digest is equal.

It covers the structure of the model, the attributes and configuration values that ``ModelState`` watches, the source
files of the user's own classes and functions, and the versions of libraries.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import platform
import sys
import types
from collections.abc import Collection, Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...inputs import class_name
from ...region import Read
from ...version import __version__
from .active_modes import default_device, onlooker
from .authors import is_of_project
from .code_state import Code
from .fingerprint import fingerprints
from .hooks import global_hook, has_hooks
from .model_state import ModelState
from .ran_code import PLAIN, code_text, plain_text
from .references import configurations, is_config_dict, is_plain_object, slotted, without_conversion
from .watch import CODE, Mark

_NUMBERS = (bool, int, float, complex, str, type(None))
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType)
_DEEPEST = 20


class NoEvidence(ValueError):
    """No digest covers the dependencies of the model; the message gives the reason in one line."""


def evidence_of(model: nn.Module, reads: Collection[Read], slots: Collection[tuple[str, str]]) -> str:
    """Return the digest for traces of ``model`` and its submodules. A conversion of the model does not change it.

    Args:
        reads: the reads of these traces.
        slots: path and name of each tensor that their programs read again in every call.

    Raises:
        NoEvidence: hooks, modes, code without a file, or values of unknown kinds.
    """
    state = ModelState(model, reads, slots)
    places = _places(model)
    described = functools.partial(_described, places=places)
    lines = [*_process(), *_structure(model, places), *_code(model, state.code)]
    lines += [f"{described(key)} | {described(value)}" for _, key, value in state.attributes.watch.entries]
    held = {path: vars(module) for path, module in model.named_modules(remove_duplicate=False)}
    for path, name in sorted(slots):
        if name in held.get(path, ()):  # an attribute, which is no parameter or buffer
            lines.append(f"{path}.{name} | {described(held[path][name])}")
    for each in (*model.modules(), *configurations(model)):
        # The code may go through all attributes, in their order.
        if (type(each), "__dict__") in reads or ("__dict__" in reads and not isinstance(each, nn.Module)):
            lines.append(f"{class_name(type(each))} {list(without_conversion(vars(each)))}")
    for _, value, known in state.compared:
        contents = fingerprints([value]) if isinstance(value, Tensor) else known
        lines.append(f"{described(value)} | {described(contents)}")
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()


def _process() -> Iterator[str]:
    """The versions of libraries, and the modes of the process."""
    if global_hook() is not None or onlooker() is not None:
        raise NoEvidence(str(global_hook() or onlooker()))
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise NoEvidence("autocast is on")
    yield f"kfconvert {__version__}, torch {torch.__version__}, numpy {numpy.__version__}"
    yield f"{platform.python_implementation()} {platform.python_version()}"
    yield f"{torch.get_default_dtype()} {default_device()} {torch.are_deterministic_algorithms_enabled()}"


def _places(model: nn.Module) -> dict[int, str]:
    """The first path of each module and tensor, by its id: it shows which places share one object."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        found.setdefault(id(module), f"the module {path}")
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            found.setdefault(id(tensor), f"{path}.{name}")
    return found


def _structure(model: nn.Module, places: dict[int, str]) -> Iterator[str]:
    """Describe the modules and tensors of ``model``."""
    for path, module in model.named_modules(remove_duplicate=False):
        forward = vars(module).get("forward")
        own_forward = getattr(forward, "own_forward", forward)  # from before a conversion
        if own_forward is not None or has_hooks(module):
            raise NoEvidence(f"{path or 'the model'} has a forward or hooks of the instance")
        bases = [class_name(base) for base in type(module).__mro__]
        yield f"{path} is {places[id(module)]}, {bases}, {module.training}"
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            yield f"{path}: {key} is {_described(tensor, places)}"
            yield from _inside(tensor)


def _inside(tensor: Tensor | None) -> Iterator[str]:
    """Describes the inner tensors and the settings of a quantized weight."""
    if is_traceable_wrapper_subclass(tensor):
        names, settings = tensor.__tensor_flatten__()
        yield f"{settings}"
        for name in names:
            inner = getattr(tensor, name)
            yield f"{name} is {_described(inner)}"
            yield from _inside(inner)


def _code(model: nn.Module, code: Code) -> Iterator[str]:
    """The code of the model: the user's files by contents, libraries by version, and functions by name."""
    tensors = [each for module in model.modules() for each in (*module._parameters.values(), *module._buffers.values())]
    bases = {base.__module__ for each in (*model.modules(), *tensors) for base in type(each).__mro__}
    for name in sorted(bases | {function.__module__ or "" for function in code.functions}):
        module = sys.modules.get(name if is_of_project(name) else name.partition(".")[0])
        yield f"{name} {_digest_of(module) if is_of_project(name) else getattr(module, '__version__', '')}"
    yield from map(_function, code.functions)
    for _, key, value in code.places.watch.entries:
        if key is not CODE and isinstance(value, _NUMBERS):
            yield f"{key} {value!r}"
        elif key is not CODE and isinstance(value, _FUNCTIONS):
            yield f"{key} {class_name(value)}"  # type: ignore[arg-type]
    yield f"{sorted(code.switches.items())}"


def _function(function: types.FunctionType) -> str:
    """Describe a function with its code, as a file may have several functions of one name, and with the values that it
    took when it was defined."""
    held = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    fixed = [plain_text(value) for value in held if not isinstance(value, (list, dict, set))]
    return f"{class_name(function)} {code_text(function.__code__)} {fixed}"  # type: ignore[arg-type]


def _digest_of(module: types.ModuleType | None) -> str:
    try:
        with open(getattr(module, "__file__", None) or "", "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError as error:  # a notebook
        raise NoEvidence("its code is in no file") from error


def _described(value: Any, places: dict[int, str] | None = None, depth: int = 0) -> str:
    """Describe ``value`` identically in every process. Plain objects are described by their class and their number in
    ``places``, as their attributes have entries."""
    kind = type(value)
    inner = functools.partial(_described, places=places, depth=depth + 1)
    if isinstance(value, Mark):
        return value.name
    if isinstance(value, enum.Enum):
        return f"{class_name(kind)}.{value.name} {inner(value._value_)}"
    if isinstance(value, PLAIN):
        return f"{class_name(kind)} {value!r}"
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else value.layout
        place = (places or {}).get(id(value), "")
        return f"{class_name(kind)} {place} {value.dtype} {value.device} {value.shape} {strides}"
    if isinstance(value, nn.Module):
        return f"{class_name(kind)} {(places or {}).get(id(value), '')}"
    if is_config_dict(value) or (is_plain_object(value) and not slotted(value)):
        place = "" if places is None else places.setdefault(id(value), f"object {len(places)}")
        return f"{class_name(kind)} {place}"
    if depth < _DEEPEST and isinstance(value, (dict, list, tuple, set, frozenset)):
        held = list(map(inner, dict.items(value) if isinstance(value, dict) else value))
        return f"{class_name(kind)} {sorted(held) if isinstance(value, (set, frozenset)) else held}"
    if isinstance(value, _FUNCTIONS) and "<" not in value.__qualname__:
        return f"{class_name(kind)} {class_name(value)}"  # type: ignore[arg-type]
    if isinstance(value, functools.partial):
        return f"{class_name(kind)} {inner((value.func, value.args, value.keywords))}"
    if isinstance(value, types.MethodType):
        return f"{class_name(kind)} {inner((value.__func__, value.__self__))}"
    raise NoEvidence(f"it depends on a value of the class {kind.__name__}, which no digest covers")
