"""A digest of everything that traces of a model depend on: a stored graph is used where the digest is equal.

It covers the structure of the model, and the attributes, configuration values and globals that ``ModelState`` watches.
It also covers the source files of the user's own classes and functions, and the versions of libraries.
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

from ...inputs import class_name
from ...region import Read
from ...version import __version__
from .active_modes import default_device, onlooker
from .code_state import Code, Codes
from .contents import is_config_dict, is_of_project
from .fingerprint import fingerprints
from .hooks import global_hook, has_hooks
from .model_state import ModelState
from .watch import INSIDE, Mark

# Attributes that torch.compile adds to functions.
_OF_DYNAMO = ("_torchdynamo", "___needs_generation_tag")
_BY_TEXT: tuple[type, ...] = (
    bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.layout,
    torch.memory_format, numpy.dtype, numpy.generic, types.EllipsisType,
)  # fmt: skip
_DEEPEST = 20
_DIGEST_SIZE = 16


class NoEvidence(ValueError):
    """No digest covers the dependencies of the model; the message gives the reason in one line."""


def evidence_of(
    model: nn.Module,
    reads: Collection[Read],
    slots: Collection[tuple[str, str]],
    looks: bool = False,
    codes: Codes | None = None,
) -> str:
    """Return the digest for traces of ``model`` and its submodules. A conversion of the model does not change it.

    Args:
        reads: the reads of these traces.
        slots: path and name of each tensor that their programs read again in every call.
        looks: whether the code reads elements of tensors, so that tensors among attributes matter.
        codes: stores the code behind the model, for later watches.

    Raises:
        NoEvidence: hooks, modes, or attributes that replace tensors or submodules.
    """
    state = ModelState(model, reads, slots, looks=looks, codes=codes)
    places = _places(model)
    held = {path: vars(module) for path, module in model.named_modules(remove_duplicate=False)}
    described = functools.partial(_described, places=places)
    lines = [*_process(), *_structure(model, places), *_sources(model, state.code)]
    # Slots that are plain attributes are in no parameter or buffer dict of their module.
    plain = [(path, name) for path, name in sorted(slots) if name in held.get(path, ())]
    lines += [f"{path}.{name}: {described(held[path][name])}" for path, name in plain]
    lines += [f"{name} is {value!r}" for name, value in sorted(state.code.switches.items())]
    for names, watch in ((state.code.names, state.code.watch), (state.attribute_reasons, state.attributes)):
        for name, (holder, key, value) in zip(names, watch.entries):
            of_library = key is INSIDE and not is_of_project(holder.__module__)
            if not (of_library or (isinstance(key, str) and key.startswith(_OF_DYNAMO))):
                # The contents of containers among the globals are fixed at conversion.
                is_container = names is state.code.names and isinstance(value, (list, dict, set))
                shown = class_name(type(value)) if is_container else described(value)
                lines.append(f"{name} | {described(key)} | {shown}")
    for name, value, known in state.compared:
        contents = fingerprints([value]) if isinstance(value, Tensor) else known
        lines.append(f"{name} | {described(value)} | {described(contents)}")
    lines += [f"attributes: {names}" for _, names in state.namespaces]
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
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    found.setdefault(id(tensor), f"{path}.{name}")
    return found


def _structure(model: nn.Module, places: dict[int, str]) -> Iterator[str]:
    """Describe the modules and tensors of ``model``."""
    for path, module in model.named_modules(remove_duplicate=False):
        forward = vars(module).get("forward")
        own_forward = getattr(forward, "own_forward", forward)  # from before a conversion
        if own_forward is not None or has_hooks(module):
            raise NoEvidence(f"{path or 'the model'} has a forward or hooks of the instance")
        if not vars(module).keys().isdisjoint((*module._parameters, *module._buffers, *module._modules)):
            raise NoEvidence(f"{path or 'the model'} has attributes that replace parameters, buffers or submodules")
        bases = [class_name(base) for base in type(module).__mro__]
        yield f"{path} is {places[id(module)]}, {bases}, {module.training}"
        for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
            for key, tensor in store.items():
                yield f"{path}: {kind} {key} is {_described(tensor, places)}"


def _sources(model: nn.Module, code: Code) -> Iterator[str]:
    """The Python modules with code of the model: the user's files by contents, libraries by version."""
    bases = {base.__module__ for module in model.modules() for base in type(module).__mro__}
    for name in sorted(bases | {function.__module__ or "" for function in code.functions}):
        if is_of_project(name):
            yield f"{name} {_digest_of(getattr(sys.modules.get(name), '__file__', None))}"
        else:
            package = name.partition(".")[0]
            yield f"{name} {getattr(sys.modules.get(package), '__version__', '')}"
    for function in code.functions:  # their files may be missing, as for notebook cells
        if is_of_project(function.__module__):
            yield f"{class_name(function)} {_of_code(function.__code__)}"  # type: ignore[arg-type]


def _digest_of(path: str | None) -> str:
    try:
        with open(path or "", "rb") as file:
            return hashlib.blake2b(file.read(), digest_size=_DIGEST_SIZE).hexdigest()
    except OSError:
        return ""


def _of_code(code: types.CodeType) -> str:
    """Describe the instructions and constants of ``code``, identically in every process."""
    constants = [_of_code(each) if isinstance(each, types.CodeType) else _described(each) for each in code.co_consts]
    return f"{code.co_code!r} {code.co_names} {code.co_varnames} {code.co_freevars} {constants}"


def _described(value: Any, places: dict[int, str] | None = None, depth: int = 0) -> str:
    """Describe ``value`` identically in every process. Plain objects, whose attributes have entries, and objects of
    libraries are described by their class alone."""
    if depth > _DEEPEST:
        raise NoEvidence("it depends on values that are nested too deeply")
    kind = type(value)
    inner = functools.partial(_described, places=places, depth=depth + 1)
    if isinstance(value, Mark):
        return value.name
    if isinstance(value, enum.Enum):
        return f"{class_name(kind)}.{value.name} {inner(value._value_)}"
    if isinstance(value, _BY_TEXT):
        return f"{class_name(kind)} {value!r}"
    if isinstance(value, (set, frozenset)):
        return f"{class_name(kind)} {sorted(map(inner, value))}"
    if is_config_dict(value):  # entries cover its reads
        return str(class_name(kind))
    if isinstance(value, dict):
        return f"{class_name(kind)} {[(inner(key), inner(item)) for key, item in dict.items(value)]}"
    if isinstance(value, (list, tuple)):
        return f"{class_name(kind)} {list(map(inner, value))}"
    if isinstance(value, Tensor):
        strides = value.stride() if value.layout is torch.strided else value.layout
        place = (places or {}).get(id(value), "")
        return f"{class_name(kind)} {place} {value.dtype} {value.device} {value.shape} {strides}"
    if isinstance(value, nn.Module):
        return f"{class_name(kind)} {(places or {}).get(id(value), '')}"
    if isinstance(value, numpy.ndarray):
        return f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    if isinstance(value, types.CodeType):
        return _of_code(value)
    if isinstance(value, (property, staticmethod, classmethod, functools._lru_cache_wrapper, functools.partial)):
        found = [getattr(value, name, None) for name in ("fget", "__wrapped__", "func", "args", "keywords")]
        return f"{class_name(kind)} {inner(found)}"
    if isinstance(value, types.MethodType):
        return f"{inner(value.__func__)} of {inner(value.__self__)}"
    if isinstance(value, types.FunctionType) and is_of_project(value.__module__):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return f"{class_name(value)} {inner((value.__defaults__, value.__kwdefaults__, cells))}"  # type: ignore[arg-type]
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        return f"{class_name(kind)} {getattr(value, '__module__', '')}.{name}"
    return f"module {value.__name__}" if isinstance(value, types.ModuleType) else str(class_name(kind))
