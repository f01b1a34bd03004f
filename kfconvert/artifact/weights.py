"""Weights and buffers in files: which tensors can be stored, and how they are loaded into a model."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..accuracy import is_same_tensor
from ..conversion import first_line
from .errors import ArtifactError
from .quantized import is_same_quantized, unstorable_wrapper
from .tensor_files import unstorable

# The entry that safetensors reserves in a file; it writes a tensor of that name, but cannot read it.
_OF_FORMAT = "__metadata__"
# BatchNorm only adds a counter that old files lack.
_COPYING = (nn.Module._load_from_state_dict, nn.modules.batchnorm._NormBase._load_from_state_dict)


def checked_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict, with the model's own tensors.

    Raises:
        ArtifactError: it cannot be stored.
    """
    try:
        state = model.state_dict(keep_vars=True)
    except Exception as error:  # from hooks, or tensor subclasses
        raise ArtifactError(f"the state of {type(model).__name__} cannot be read: {first_line(error)}") from error
    for key, value in state.items():
        reason = _unstorable(key, value)
        if reason is not None:
            raise ArtifactError(f"the state {key!r} {reason}")
    return state


def state_metadata(state: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Returns the metadata of a ``state`` dict by the path of a module: the version of its class, by which the class
    detects old weights. Modules of version 1, the usual version, are omitted."""
    versions = {path: entry.get("version", 1) for path, entry in getattr(state, "_metadata", {}).items()}
    return {path: {"version": version} for path, version in versions.items() if version != 1}


def other_buffers(model: nn.Module, tensors: Collection[str]) -> dict[str, Tensor]:
    """Returns the buffers that are not in ``tensors``. A buffer that cannot be stored keeps its value in ``load``."""
    buffers = model.named_buffers(remove_duplicate=False)
    return {key: b for key, b in buffers if key not in tensors and _unstorable(key, b) is None}


def _unstorable(key: str, value: Any) -> str | None:
    """Returns why a portable weights file cannot contain the state ``value`` under ``key``; None if it can."""
    if key == _OF_FORMAT:
        return "has a name that safetensors reserves: it cannot be stored"
    if isinstance(value, nn.Parameter) and is_traceable_wrapper_subclass(value):
        return unstorable_wrapper(value)
    return unstorable(value)


def fill(
    model: nn.Module,
    tensors: dict[str, Tensor],
    metadata: dict[str, dict[str, Any]],
    folder: Path,
    device: torch.device,
) -> None:
    """Loads ``tensors`` of the artifact in ``folder`` strictly; parameters and buffers get the stored dtypes. For keys
    of one shared tensor in ``model``, one key is enough, as in files from ``save_pretrained``. Quantized tensors, which
    are on ``device``, become new parameters.

    The weights go straight to ``device`` if ``model`` is on another device: its memory there is not even written.

    Args:
        metadata: the result of ``state_metadata``.

    Raises:
        ArtifactError: the tensors do not fit.
    """
    copies, placed = _loads_by_copies(model), dict[int, Tensor]()
    tensors = tensors | _place_quantized(model, tensors, copies)
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    for key, own in chain(parameters, buffers):
        if key not in tensors or id(own) in placed:
            continue
        is_copy = copies and _is_alike(own, tensors[key])
        try:
            if is_copy and own.device != device:
                own.data = tensors[key].to(device, copy=True)
                placed[id(own)] = own
            elif own.dtype != (dtype := tensors[key].dtype):
                own.data = torch.empty_like(own.data, dtype=dtype) if is_copy else own.data.to(dtype)
        except RuntimeError as error:  # integers for a parameter that requires a gradient
            raise ArtifactError(f"{folder}: the weights do not fit: {key}: {first_line(error)}") from error
    tied: dict[int, list[str]] = {}
    for key, own in model.state_dict(keep_vars=True).items():
        tied.setdefault(id(own), []).append(key)
    for keys in tied.values():
        stored = [key for key in keys if key in tensors]
        for key in stored[1:]:
            if tensors[key] is not tensors[stored[0]] and not is_same_tensor(tensors[key], tensors[stored[0]]):
                found = f"{stored[0]} and {key} are one tensor, but two in the artifact"
                raise ArtifactError(f"{folder}: the weights do not fit: {found}")
        if stored:
            tensors = dict.fromkeys(keys, tensors[stored[0]]) | tensors
    state = OrderedDict(tensors)
    # A copy of a tensor to itself does nothing.
    state.update((key, own) for key, own in model.state_dict(keep_vars=True).items() if id(own) in placed)
    of_all = {path: {"version": 1} | metadata.get(path, {}) for path, _ in model.named_modules(remove_duplicate=False)}
    state._metadata = of_all  # type: ignore[attr-defined]  # as torch stores it
    try:
        model.load_state_dict(state, strict=True)
    except Exception as error:  # classes may customize loading
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        more = f" (and {len(lines) - 2} more)" if len(lines) > 2 else ""
        detail = lines[1] if len(lines) > 1 else lines[0]
        raise ArtifactError(f"{folder}: the weights do not fit {type(model).__name__}: {detail[:300]}{more}") from error


def _place_quantized(model: nn.Module, tensors: dict[str, Tensor], copies: bool) -> dict[str, Tensor]:
    """Replaces the parameters of ``model`` for which ``tensors`` has a quantized tensor of the same shape, and returns
    the values to load into the new parameters. Parameters that were one stay one if their tensors are equal.

    Args:
        copies: whether the model loads by copies; the new parameters are then these tensors.
    """
    made, values = defaultdict[int, list[tuple[Tensor, nn.Parameter]]](list), dict[str, Tensor]()
    for key, own in list(model.named_parameters(remove_duplicate=False)):
        stored = tensors.get(key)
        if stored is None or not is_traceable_wrapper_subclass(stored) or stored.shape != own.shape:
            continue
        found = next((pair for pair in made[id(own)] if is_same_quantized(pair[0], stored)), None)
        if found is None:
            parameter = nn.Parameter(stored if copies else stored.clone(), requires_grad=False)
            made[id(own)].append(found := (parameter if copies else stored, parameter))
        path, _, name = key.rpartition(".")
        values[key], parameter = found
        setattr(model.get_submodule(path), name, parameter)
    return values


def _is_alike(own: Tensor, stored: Tensor) -> bool:
    """Whether both are plain tensors of the same shape and memory layout."""
    return type(own) in (Tensor, nn.Parameter) and (own.shape, own.stride()) == (stored.shape, stored.stride())


def _loads_by_copies(model: nn.Module) -> bool:
    """Whether ``load_state_dict`` copies each value to the tensor of the same name. Classes and hooks may do more."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        return False
    return not any(
        module._load_state_dict_pre_hooks or type(module)._load_from_state_dict not in _COPYING
        for module in model.modules()
    )


def fill_buffers(model: nn.Module, buffers: dict[str, Tensor]) -> None:
    """Sets the buffers of these names to their saved values; ignores names that the model does not have."""
    for key, own in model.named_buffers(remove_duplicate=False):
        if key in buffers and own is not None and not own.is_meta:
            own.data = buffers[key].to(own.device, copy=True)  # not the memory of the file


def missing_from(stored: Mapping[str, Sequence[int]], state: Mapping[str, Tensor]) -> str | None:
    """Returns a key that only one of a model's ``state`` and of files with tensors of these keys and shapes has; None
    if they match."""
    held = {id(own) for key, own in state.items() if key in stored}
    for key, own in state.items():
        if tuple(stored[key]) != tuple(own.shape) if key in stored else id(own) not in held:
            return key
    return next((key for key in stored if key not in state), None)
