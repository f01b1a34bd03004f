"""Runs a model in another dtype without a copy of its weights: each module casts its own ones while it runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .copying import tensors_of


def bytes_in(model: nn.Module, dtype: torch.dtype) -> int:
    """Returns the size of the half-precision weights of ``model`` in ``dtype``."""
    tensors = {id(tensor): tensor for tensor in tensors_of(model) if tensor.is_floating_point()}
    return sum(tensor.numel() for tensor in tensors.values() if tensor.element_size() == 2) * dtype.itemsize


class WithoutHalf(TorchDispatchMode):
    """Mode that raises TypeError for a cast from a wider to a half type: code may read the dtype of a weight outside of
    the call of its module."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_cast = func is torch.ops.aten._to_copy.default and kwargs.get("dtype") in (torch.float16, torch.bfloat16)
        if is_cast and args[0].is_floating_point() and args[0].element_size() > 2:
            raise TypeError("a value is cast to a half type")
        return func(*args, **kwargs)


@contextmanager
def cast_in_calls(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context manager under which a module of ``model`` has its floating-point weights in ``dtype`` during its call.
    Code that reads the weight of a module outside of that module's call finds the weight as it is."""
    with ExitStack() as contexts:
        for module in model.modules():
            stores = module._parameters, module._buffers
            if any(tensor is not None and tensor.is_floating_point() for store in stores for tensor in store.values()):
                cast = _Cast(dtype)
                contexts.enter_context(module.register_forward_pre_hook(cast.begin, prepend=True))
                contexts.enter_context(module.register_forward_hook(cast.end, always_call=True))
        yield


class _Cast:
    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype
        #: For each call that runs: dict of tensors, name, tensor, cast tensor and its version.
        self._calls: list[list[tuple[dict[str, Any], str, Tensor, Tensor, int]]] = []

    def begin(self, module: nn.Module, args: Any) -> None:
        casts = []
        stores: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        for store in stores:
            for name, tensor in store.items():
                if tensor is not None and tensor.is_floating_point() and tensor.dtype != self._dtype:
                    made: Tensor = tensor.detach().to(self._dtype)
                    made = nn.Parameter(made, False) if isinstance(tensor, nn.Parameter) else made
                    casts.append((store, name, tensor, made, made._version))
        for store, name, _, made, _ in casts:
            store[name] = made
        self._calls.append(casts)

    def end(self, *_: Any) -> None:
        for store, name, tensor, made, version in self._calls.pop():
            if store.get(name) is made and made._version == version:  # otherwise, the call wrote a new value
                store[name] = tensor
