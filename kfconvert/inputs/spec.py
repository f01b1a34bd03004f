"""Example inputs as JSON: shapes, dtypes and value ranges of tensors, kinds of key-value caches, and classes of named
outputs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from ..json_values import first_fault
from ..torch_state import is_dense
from .caches import is_cache, kind_of
from .records import class_name, is_record, record_named
from .stored_caches import UnstorableCache, made_kind, stored_kind

LARGEST = 2**33  # bytes of all tensors of a call
_PLAIN = (bool, int, float, str, type(None))
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_INT64_MAX = 2**63 - 1


class InputSpecError(ValueError):
    """Raised if inputs cannot be described, or a description cannot be read."""


class _TensorSpec(BaseModel, strict=True):
    """A tensor of standard normal numbers, or of integers from ``low`` to ``high``; or the tensor number ``same``."""

    shape: list[Annotated[int, Field(ge=0, le=_INT64_MAX)]] = Field(max_length=64)
    dtype: str
    channels_last: bool = False
    same: int | None = Field(None, ge=0)
    low: int = Field(0, ge=-_INT64_MAX)
    high: int = Field(0, lt=_INT64_MAX)


def describe(inputs: Any) -> Any:
    """Returns a JSON value for ``inputs``: tensors by shape, dtype and range (integers and bools); a repeated tensor by
    its number in the order of tensors.

    Raises:
        InputSpecError: a leaf is not a strided tensor, number, string, bool, None or known cache, or the tensors have
            more than LARGEST bytes.
    """
    tensors: list[Tensor] = []
    spec = _describe(inputs, tensors)
    _check_size(tensors)
    return spec


def described(arguments: Any) -> Any:
    """Returns ``describe(arguments)``; None if they cannot be described."""
    try:
        return describe(arguments)
    except InputSpecError:
        return None


def _describe(inputs: Any, tensors: list[Tensor]) -> Any:
    if isinstance(inputs, Tensor):
        return {"tensor": _described_tensor(inputs, tensors)}
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
    found = kind_of(inputs) if is_cache(inputs) else None
    if found is None:
        raise InputSpecError(f"an example input of type {type(inputs).__name__} cannot be described")
    try:
        kind_spec = stored_kind(found[0])
    except UnstorableCache as error:
        raise InputSpecError(f"an example input cannot be described: {error}") from error
    return {"cache": {"kind": kind_spec, "tensors": [_describe(tensor, tensors) for tensor in found[1]]}}


def _described_tensor(tensor: Tensor, tensors: list[Tensor]) -> dict[str, Any]:
    if not is_dense(tensor):
        raise InputSpecError("an example input is a nested, quantized or sparse tensor, which cannot be described")
    spec: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
    same = next((index for index, each in enumerate(tensors) if each is tensor), None)
    tensors.append(tensor)
    if tensor.dim() in _CHANNELS_LAST and not tensor.is_contiguous():
        spec["channels_last"] = tensor.is_contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])
    if same is not None:
        spec["same"] = same
    elif not _inexact(tensor.dtype) and tensor.numel():
        # PyTorch has no minimum and maximum for the wider unsigned types.
        values = tensor.cpu().numpy() if tensor.dtype in _WIDE_UNSIGNED else tensor
        spec["low"], spec["high"] = (min(int(bound), _INT64_MAX - 1) for bound in (values.min(), values.max()))
    return spec


def build(spec: Any, device: torch.device | str = "cpu") -> Any:
    """Creates inputs for a ``spec`` from ``describe``: standard normal numbers, or uniform integers in the range.

    Raises:
        InputSpecError: ``spec`` is invalid, or needs more than LARGEST bytes.
    """
    try:
        return _build(spec, torch.device(device), torch.Generator().manual_seed(0), [])
    except InputSpecError:
        raise
    except ValidationError as error:
        raise InputSpecError(f"a tensor of the example inputs {first_fault(error)}") from error
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise InputSpecError(f"the description of the example inputs cannot be read: {reason}") from error


def _build(spec: Any, device: torch.device, generator: torch.Generator, tensors: list[Tensor]) -> Any:
    ((kind, value),) = spec.items()

    def built(items: Iterable[Any]) -> list[Any]:
        return [_build(item, device, generator, tensors) for item in items]

    if kind == "value" and isinstance(value, _PLAIN):
        return value
    if kind == "number":
        return float(value)
    if kind == "tensor":
        tensors.append(_tensor(_TensorSpec.model_validate(value), device, generator, tensors))
        return tensors[-1]
    if kind in ("tuple", "list") and isinstance(value, list):
        return tuple(built(value)) if kind == "tuple" else built(value)
    if kind == "dict":
        return dict(zip(value, built(value.values())))
    if kind == "record" and (output := record_named(value["class"])) is not None:
        return output(**dict(zip(value["items"], built(value["items"].values()))))
    if kind == "cache":
        of_cache, held = made_kind(value["kind"]), built(value["tensors"])
        if len(held) == of_cache.count and all(isinstance(each, Tensor) for each in held):
            return of_cache.made(held)
    raise InputSpecError(f"the description of the example inputs has an unknown {str(kind)[:50]!r}")


def _tensor(spec: _TensorSpec, device: torch.device, generator: torch.Generator, tensors: list[Tensor]) -> Tensor:
    if spec.same is not None:
        if list(tensors[spec.same].shape) != spec.shape:
            raise InputSpecError("the example inputs have one tensor with two shapes")
        return tensors[spec.same]
    dtype = getattr(torch, spec.dtype)
    _check_size([*tensors, torch.empty(spec.shape, dtype=dtype, device="meta")])
    if _inexact(dtype):
        tensor = torch.randn(spec.shape, generator=generator).to(dtype)
    else:
        tensor = torch.randint(spec.low, spec.high + 1, spec.shape, generator=generator).to(dtype)
    return (tensor.to(memory_format=_CHANNELS_LAST[tensor.dim()]) if spec.channels_last else tensor).to(device)


def _check_size(tensors: Iterable[Tensor]) -> None:
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors) > LARGEST:
        raise InputSpecError(f"the example inputs take more than {LARGEST} bytes")


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
