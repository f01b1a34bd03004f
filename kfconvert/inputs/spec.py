"""Example inputs as JSON: shapes, dtypes and value ranges of tensors, kinds of key-value caches, and classes of named
outputs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..torch_state import is_dense
from .caches import is_cache, kind_of
from .records import class_name, is_record, record_named
from .stored_values import Reader, Unstorable, Writer

LARGEST = 2**33  # bytes of all tensors of a call
_PLAIN = (bool, int, float, str, type(None))
_NOT_FINITE = ("inf", "-inf", "nan")
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_MOST_DIMENSIONS = 64
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_INT64_MAX = 2**63 - 1


class InputSpecError(ValueError):
    """Raised if inputs cannot be described, or a description cannot be read."""


def describe(inputs: Any) -> Any:
    """Returns a JSON value for ``inputs``: tensors by shape, dtype and range (integers and bools); a repeated tensor by
    its number in the order of tensors.

    Raises:
        InputSpecError: a leaf is not a strided tensor, number, string, bool, None or known cache, or the tensors have
            more than LARGEST bytes.
    """
    spec = _describe(inputs, [])
    _check_size(spec)
    return spec


def described(arguments: Any) -> Any:
    """Returns ``describe(arguments)``; None if they cannot be described."""
    try:
        return describe(arguments)
    except InputSpecError:
        return None


def _describe(inputs: Any, tensors: list[Tensor]) -> Any:
    if isinstance(inputs, Tensor):
        if not is_dense(inputs):
            raise InputSpecError("an example input is a nested, quantized or sparse tensor, which cannot be described")
        spec: dict[str, Any] = {"shape": list(inputs.shape), "dtype": str(inputs.dtype).removeprefix("torch.")}
        same = next((index for index, tensor in enumerate(tensors) if tensor is inputs), None)
        tensors.append(inputs)
        if inputs.dim() in _CHANNELS_LAST and not inputs.is_contiguous():
            spec["channels_last"] = inputs.is_contiguous(memory_format=_CHANNELS_LAST[inputs.dim()])
        if same is not None:
            spec["same"] = same
        elif not _inexact(inputs.dtype) and inputs.numel():
            # PyTorch has no minimum and maximum for the wider unsigned types.
            values = inputs.cpu().numpy() if inputs.dtype in _WIDE_UNSIGNED else inputs
            spec |= {"low": _bounded(values.min()), "high": _bounded(values.max())}
        return {"tensor": spec}
    if isinstance(inputs, float) and not math.isfinite(inputs):
        return {"number": repr(inputs)}  # not representable in JSON
    if isinstance(inputs, _PLAIN):
        return {"value": inputs}
    if isinstance(inputs, (tuple, list)):
        return {type(inputs).__name__: [_describe(item, tensors) for item in inputs]}
    if isinstance(inputs, dict):
        if not all(isinstance(key, str) for key in inputs):
            raise InputSpecError("an example input is a dict with keys that are not strings")
        items = {key: _describe(value, tensors) for key, value in inputs.items()}
        kind = type(inputs)
        return {"record": {"class": list(class_name(kind)), "items": items}} if is_record(kind) else {"dict": items}
    if is_cache(inputs):
        return {"cache": _described_cache(inputs, tensors)}
    raise InputSpecError(f"an example input of type {type(inputs).__name__} cannot be described")


def _described_cache(cache: Any, tensors: list[Tensor]) -> dict[str, Any]:
    found = kind_of(cache)
    if found is None:
        raise InputSpecError("an example input is a cache of an unknown kind")
    try:
        kind = Writer().stored(found[0])
    except Unstorable as error:
        raise InputSpecError(f"an example input cannot be described: {error}") from error
    return {"kind": kind, "tensors": [_describe(tensor, tensors) for tensor in found[1]]}


def _bounded(value: Any) -> int:
    """Clamps a bound of integers to the range of a description."""
    return min(int(value), _INT64_MAX - 1)


def build(spec: Any, device: torch.device | str = "cpu") -> Any:
    """Creates inputs for a ``spec`` from ``describe``: standard normal numbers, or uniform integers in the range.

    Raises:
        InputSpecError: ``spec`` is invalid, or needs more than LARGEST bytes.
    """
    _check_size(spec)
    return _build(spec, torch.device(device), torch.Generator().manual_seed(0), [])


def _build(spec: Any, device: torch.device, generator: torch.Generator, tensors: list[Tensor]) -> Any:
    kind, value = _item(spec)
    if kind == "value":
        return value
    if kind == "number":
        return float(value)
    if kind == "tensor":
        given = "same" in value
        tensors.append(_given_before(value, tensors) if given else _laid_out(value, generator).to(device))
        return tensors[-1]
    if kind == "dict":
        return {key: _build(item, device, generator, tensors) for key, item in value.items()}
    if kind == "record":
        return _record(value, {key: _build(item, device, generator, tensors) for key, item in value["items"].items()})
    if kind == "cache":
        return _cache(value, [_build(item, device, generator, tensors) for item in value["tensors"]])
    items = [_build(item, device, generator, tensors) for item in value]
    return tuple(items) if kind == "tuple" else items


def _record(spec: dict[str, Any], items: dict[str, Any]) -> Any:
    kind = record_named(spec.get("class"))
    if kind is None:
        raise _unreadable("it names an output class that does not exist")
    try:
        return kind(**items)
    except (TypeError, ValueError) as error:  # unknown names
        raise _unreadable(f"a {kind.__name__} cannot be created from its items") from error


def _cache(spec: dict[str, Any], tensors: list[Tensor]) -> Any:
    try:
        return Reader().made(spec["kind"]).made(tensors)
    except Exception as error:  # for invalid values
        raise _unreadable(f"its cache cannot be created: {type(error).__name__}") from error


def _laid_out(spec: dict[str, Any], generator: torch.Generator) -> Tensor:
    tensor = _tensor(spec, generator)
    return tensor.to(memory_format=_CHANNELS_LAST[tensor.dim()]) if spec.get("channels_last") else tensor


def _given_before(spec: dict[str, Any], tensors: list[Tensor]) -> Tensor:
    same = spec["same"]
    if not (_is_size(same) and same < len(tensors) and list(tensors[same].shape) == spec["shape"]):
        raise _unreadable("a tensor refers to a tensor that does not come before it")
    return tensors[same]


def _check_size(spec: Any) -> None:
    if _bytes(spec) > LARGEST:
        raise InputSpecError(f"the example inputs take more than {LARGEST} bytes")


def _bytes(spec: Any) -> int:
    """Checks ``spec`` against the schema and returns the bytes of all its tensors."""
    kind, value = _item(spec)
    if kind == "tensor":
        return math.prod(value["shape"]) * _dtype(value).itemsize
    if kind in ("value", "number"):
        return 0
    within = {"cache": "tensors", "record": "items"}
    items = value[within[kind]] if kind in within else value
    return sum(map(_bytes, items.values() if isinstance(items, dict) else items))


def _item(spec: Any) -> tuple[str, Any]:
    """Checks a description and returns its kind and value."""
    if not (isinstance(spec, dict) and len(spec) == 1):
        raise _unreadable("it is not a dict with one kind")
    ((kind, value),) = spec.items()
    mappings = dict.fromkeys(("tensor", "dict", "cache", "record"), dict)
    types: dict[str, Any] = {"value": _PLAIN, "number": str, "tuple": list, "list": list, **mappings}
    if kind not in types:
        raise InputSpecError(f"the description of the example inputs has the unknown kind {str(kind)[:50]!r}")
    if not isinstance(value, types[kind]):
        raise _unreadable(f"{kind} contains {type(value).__name__}")
    if kind == "tensor":
        _check_tensor(value)
    if kind == "record" and not isinstance(value.get("items"), dict):
        raise _unreadable("a record has no items")
    if kind == "cache" and not _is_of_tensors(value.get("tensors")):
        raise _unreadable("a cache has no list of tensors")
    if kind == "number" and value not in _NOT_FINITE:
        raise _unreadable("a number is not inf, -inf or nan")
    return kind, value


def _is_of_tensors(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) and each.keys() == {"tensor"} for each in value)


def _check_tensor(spec: dict[str, Any]) -> None:
    shape = spec.get("shape")
    if not (isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS and all(map(_is_size, shape))):
        raise _unreadable("the shape of a tensor is invalid")
    if spec.get("channels_last") and len(shape) not in _CHANNELS_LAST:
        raise _unreadable("a tensor that is not an image has an image memory format")
    low, high = spec.get("low", 0), spec.get("high", 0)
    if _dtype(spec) is None or not (_is_int64(low) and _is_int64(high) and low <= high < _INT64_MAX):
        raise _unreadable("the dtype or range of a tensor is invalid")


def _tensor(spec: dict[str, Any], generator: torch.Generator) -> Tensor:
    dtype = _dtype(spec)
    try:
        if _inexact(dtype):
            return torch.randn(spec["shape"], generator=generator).to(dtype)
        low, high = spec.get("low", 0), spec.get("high", 0)
        return torch.randint(low, high + 1, spec["shape"], generator=generator).to(dtype)
    except RuntimeError as error:  # PyTorch rejects the sizes or the dtype
        raise _unreadable(str(error).partition("\n")[0]) from error


def _dtype(spec: dict[str, Any]) -> Any:
    """The dtype that ``spec`` names; None, which ``_check_tensor`` rejects, if there is none."""
    name = spec.get("dtype")
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None


def _is_size(value: Any) -> bool:
    return _is_int64(value) and value >= 0


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_INT64_MAX <= value <= _INT64_MAX


def _unreadable(reason: str) -> InputSpecError:
    return InputSpecError(f"the description of the example inputs cannot be read: {reason}")


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
