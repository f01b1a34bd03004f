"""Example inputs as JSON: shapes, dtypes and value ranges of tensors, kinds of key-value caches, and classes of named
outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..torch_state import is_dense
from .caches import is_cache, kind_of
from .records import class_name, is_record
from .stored_values import Reader, Unstorable, Writer

_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_INT64_MAX = 2**63 - 1


class InputSpecError(ValueError):
    """Raised if a description of inputs cannot be read."""


def described(arguments: Any) -> Any:
    """Returns a JSON value for ``arguments``: tensors by shape, dtype and range (integers and bools); a repeated tensor
    by its number in the order of tensors. Returns None if a leaf is not a strided tensor, a value of ``Writer`` or a
    known cache."""
    try:
        return _Describer().stored(arguments)
    except Unstorable:
        return None


def build(spec: Any, device: torch.device | str = "cpu") -> Any:
    """Creates inputs for a ``spec`` from ``described``: standard normal numbers, or uniform integers in the range.

    Raises:
        InputSpecError: ``spec`` is None, or damaged.
    """
    if spec is None:
        raise InputSpecError("the example inputs could not be described")
    try:
        return _Builder(torch.device(device)).made(spec)
    except Exception as error:  # for values that ``described`` does not return
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise InputSpecError(f"the description of the example inputs cannot be read: {reason}") from error


class _Describer(Writer):
    def __init__(self):
        self._tensors: list[Tensor] = []

    def stored(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return {"tensor": self._tensor(value)}
        if is_cache(value):
            found = kind_of(value)
            if found is None:
                raise Unstorable("a cache of an unknown kind")
            return {"cache": [super().stored(found[0]), list(map(self.stored, found[1]))]}
        if is_record(type(value)):
            return {"output": [list(class_name(type(value))), {key: self.stored(item) for key, item in value.items()}]}
        return super().stored(value)

    def _tensor(self, tensor: Tensor) -> dict[str, Any]:
        if not is_dense(tensor):
            raise Unstorable("a nested, quantized or sparse tensor")
        spec: dict[str, Any] = {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        same = next((index for index, each in enumerate(self._tensors) if each is tensor), None)
        self._tensors.append(tensor)
        if tensor.dim() in _CHANNELS_LAST and not tensor.is_contiguous():
            spec["channels_last"] = tensor.is_contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])
        if same is not None:
            spec["same"] = same
        elif not _inexact(tensor.dtype) and tensor.numel():
            # PyTorch has no minimum and maximum for the wider unsigned types.
            values: Any = tensor.cpu().numpy() if tensor.dtype in _WIDE_UNSIGNED else tensor
            spec |= {"low": int(values.min()), "high": int(values.max())}
        return spec


class _Builder(Reader):
    def __init__(self, device: torch.device):
        super().__init__()
        self._device, self._tensors = device, list[Tensor]()
        self._generator = torch.Generator().manual_seed(0)
        self._makers |= {"tensor": self._tensor, "cache": self._cache, "output": self._output}

    def _tensor(self, spec: dict[str, Any]) -> Tensor:
        if "same" in spec:
            tensor = self._tensors[spec["same"]]
        else:
            dtype, shape = self.made({"torch": spec["dtype"]}), spec["shape"]
            if _inexact(dtype):
                tensor = torch.randn(shape, generator=self._generator, device="cpu").to(dtype)
            else:
                low, high = spec.get("low", 0), spec.get("high", 0)
                end = min(high, _INT64_MAX - 1) + 1
                tensor = torch.randint(min(low, end - 1), end, shape, generator=self._generator, device="cpu").to(dtype)
            if spec.get("channels_last"):
                tensor = tensor.to(memory_format=_CHANNELS_LAST[tensor.dim()])
            tensor = tensor.to(self._device)
        self._tensors.append(tensor)
        return tensor

    def _cache(self, stored: list[Any]) -> Any:
        kind, tensors = stored
        return self.made(kind).made(list(map(self.made, tensors)))

    def _output(self, stored: list[Any]) -> Any:
        kind, items = stored
        return self.made({"class": kind})(**{key: self.made(item) for key, item in items.items()})


def _inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
