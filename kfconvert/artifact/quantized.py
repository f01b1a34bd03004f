"""Weights that torchao has quantized, in a file in the format of ``torchao.prototype.safetensors``.

transformers reads and writes this format, too. The file has the inner tensors of ``layer.weight`` as
``layer._weight_qdata`` and so on, and metadata that describe each weight in JSON. torchao writes these descriptions,
and rebuilds weights from the classes in its list. Its function for a whole state dict would copy all tensors.

JSON turns tuples into lists, so ``kfconvert.json`` lists the attributes that are tuples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..conversion import first_line
from ..wrapped_tensors import wrapping
from .errors import ArtifactError
from .tensor_files import unstorable

_PLAIN = json.dumps({"_type": "Tensor"})


def unstorable_wrapper(tensor: Any) -> str | None:
    """Returns why a file cannot contain ``tensor``, which wraps other tensors; None if it can."""
    if type(tensor).__module__.partition(".")[0] != "torchao":
        return unstorable(tensor)
    for name in tensor.__tensor_flatten__()[0]:
        reason = unstorable(inner := getattr(tensor, name))
        if reason is not None:
            return f"has a tensor {name!r}, which {reason}"
        if not inner.is_contiguous():
            return f"has a tensor {name!r} that is not contiguous: it cannot be stored"
    state = {"weight": tensor}
    try:
        again = unflattened(*flattened(state), tuples_in(state), torch.device("meta"))["weight"]
    except (TypeError, ValueError) as error:
        return f"is a {type(tensor).__name__} that torchao cannot store: {first_line(error)}"
    return None if wrapping(again) == wrapping(tensor) else f"is a {type(tensor).__name__} that torchao would change"


def flattened(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the plain tensors of a ``state`` dict as a file has them, and the metadata of the file.

    Raises:
        ArtifactError: two tensors would have the same name.
    """
    quantized = _quantized(state)
    if not quantized:
        return state, {}
    encoder = _library().TensorSubclassAttributeJSONEncoder
    plain = {key: value for key, value in state.items() if key not in quantized}
    inner = {
        _inner_key(key, name): getattr(value, name)
        for key, value in quantized.items()
        for name in value.__tensor_flatten__()[0]
    }
    for key in plain.keys() & inner.keys():
        raise ArtifactError(f"the state {key!r} has the name of a tensor in a quantized weight: it cannot be stored")
    described = {key: json.dumps(value, cls=encoder) for key, value in quantized.items()}
    metadata = {"tensor_names": json.dumps([*state]), **dict.fromkeys(plain, _PLAIN), **described}
    return plain | inner, metadata


def tuples_in(state: dict[str, Tensor]) -> dict[str, list[str]]:
    """Returns the names of the attributes that are tuples, for each quantized tensor in a ``state`` dict."""
    attributes = {key: value.__tensor_flatten__()[1] for key, value in _quantized(state).items()}
    return {key: [name for name, each in held.items() if type(each) is tuple] for key, held in attributes.items()}


def unflattened(
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    tuples: Mapping[str, Iterable[str]],
    device: torch.device,
) -> dict[str, Tensor]:
    """Returns the state dict for the content of a file, with quantized tensors on ``device``.

    Args:
        tuples: the result of ``tuples_in``.

    Raises:
        ArtifactError: there are quantized tensors, and torchao cannot be imported.
        ValueError: an entry is missing, or names another class. Any other error: the metadata are damaged.
    """
    state = dict(tensors)
    for key, names in tuples.items():
        tensor = _tensor(key, json.loads(metadata.get(key, _PLAIN)), state, device)
        _, attributes = tensor.__tensor_flatten__()
        for name in names:
            setattr(tensor, name, tuple(attributes[name]))
        state[key] = tensor
    return state


def is_same_quantized(tensor: Any, known: Any) -> bool:
    """Whether two quantized tensors have the same settings and bits."""
    names, _ = tensor.__tensor_flatten__()
    return wrapping(tensor) == wrapping(known) and all(
        torch.equal(*(getattr(each, name).flatten().view(torch.uint8) for each in (tensor, known))) for name in names
    )


def _quantized(state: dict[str, Tensor]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if is_traceable_wrapper_subclass(value)}


def _tensor(key: str, described: dict[str, Any], state: dict[str, Tensor], device: torch.device) -> Any:
    """Rebuilds a quantized tensor, and removes its inner tensors from ``state``."""
    library = _library()
    if described["_type"] not in library.ALLOWED_TENSORS_SUBCLASSES:
        raise ValueError(
            f"{key} has the class {str(described['_type'])[:100]}, which is not a quantized tensor of torchao"
        )
    inner = {}
    for name in described["_tensor_data_names"]:
        if (place := _inner_key(key, name)) not in state:
            raise ValueError(f"{place[:200]} is missing")
        inner[name] = state.pop(place).to(device, copy=True)  # not the memory of the file
    return library.object_from_dict({**described, "_data": {**described["_data"], **inner}})


def _inner_key(key: str, name: str) -> str:
    path, dot, last = key.rpartition(".")
    return f"{path}{dot}_{last}_{name}"


def _library() -> Any:
    try:
        from torchao.prototype.safetensors import safetensors_utils
    except ImportError as error:
        reason = f"the weights are quantized by torchao, which cannot be imported: {first_line(error)}"
        raise ArtifactError(reason) from error
    return safetensors_utils
