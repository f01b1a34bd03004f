"""Example inputs as JSON: shapes, dtypes and value ranges, from which such inputs are made again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_PLAIN = (bool, int, float, str, type(None))


class InputSpecError(ValueError):
    """Inputs that cannot be described, or a description that cannot be read."""


def describe(inputs: Any) -> Any:
    """A JSON value for ``inputs``: tensors by shape, dtype and, if integer or bool, range.

    Raises:
        InputSpecError: a leaf that is no tensor, number, string, bool or None.
    """
    if isinstance(inputs, Tensor):
        spec = {"shape": list(inputs.shape), "dtype": str(inputs.dtype).removeprefix("torch.")}
        if not _inexact(inputs.dtype) and inputs.numel():
            spec |= {"low": int(inputs.min()), "high": int(inputs.max())}
        return {"tensor": spec}
    if isinstance(inputs, _PLAIN):
        return {"value": inputs}
    if isinstance(inputs, (tuple, list)):
        return {type(inputs).__name__: [describe(item) for item in inputs]}
    if isinstance(inputs, dict):
        return {"dict": {key: describe(value) for key, value in inputs.items()}}
    raise InputSpecError(f"an example input of type {type(inputs).__name__} cannot be described")


def build(spec: Any, device: torch.device | str = "cpu") -> Any:
    """Inputs that fit a ``spec`` of ``describe``: standard normal, or uniform integers within the range."""
    return _build(spec, torch.device(device), torch.Generator().manual_seed(0))


def _build(spec: Any, device: torch.device, generator: torch.Generator) -> Any:
    try:
        ((kind, value),) = spec.items()
        if kind == "value":
            return value
        if kind in ("tuple", "list"):
            items = [_build(item, device, generator) for item in value]
            return tuple(items) if kind == "tuple" else items
        if kind == "dict":
            return {key: _build(item, device, generator) for key, item in value.items()}
        if kind == "tensor":
            return _tensor(value, generator).to(device)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputSpecError(f"the description of the example inputs cannot be read: {error!r}") from error
    raise InputSpecError(f"the description of the example inputs has the unknown kind {kind!r}")


def _tensor(spec: dict[str, Any], generator: torch.Generator) -> Tensor:
    dtype = getattr(torch, spec["dtype"])
    if _inexact(dtype):
        return torch.randn(spec["shape"], generator=generator).to(dtype)
    low, high = spec.get("low", 0), spec.get("high", 0)
    return torch.randint(low, high + 1, spec["shape"], generator=generator).to(dtype)


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
