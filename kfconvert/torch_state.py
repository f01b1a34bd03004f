"""Checks for transforms and traces of torch, and for kinds of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def transformed() -> bool:
    """Whether torch.func transforms or forward-mode derivatives are active, which the operators do not support.

    torch.compile, which supports them, treats the answer as a constant.
    """
    return _are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a wrapper within a transform of torch.func, such as ``torch.vmap``."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is strided: not nested, quantized or sparse."""
    return not tensor.is_nested and not tensor.is_quantized and tensor.layout is torch.strided


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype to which autocast casts tensors on such devices; None if it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextmanager
def without_autocast() -> Iterator[None]:
    """Context manager in which autocast is off, as ``torch.autocast(..., enabled=False)`` for all devices, but without
    its other effects and in a tenth of its time."""
    on = [each for each in ("cpu", "cuda") if torch.is_autocast_enabled(each)]
    try:
        for each in on:
            torch.set_autocast_enabled(each, False)
        yield
    finally:
        for each in on:
            torch.set_autocast_enabled(each, True)


@contextmanager
def uncached_autocast() -> Iterator[None]:
    """Context manager in which autocast keeps no copies of weights: they would use memory until the outermost
    ``torch.autocast`` ends."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def being_traced() -> bool:
    """Whether calls are traced, possibly with fake tensors, so that values read by Python would become constants.

    This is True in torch.compile, torch.export, torch.jit.trace and dispatch modes: make_fx, FakeTensorMode.
    """
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or torch.jit.is_tracing()


def keeps_calls() -> bool:
    """Whether torch.export or torch.jit.trace records the calls, which may later run in another gradient mode."""
    # torch.jit.is_tracing() is twice as slow, and each call of an operator runs this.
    return torch.compiler.is_exporting() or torch._C._get_tracing_state() is not None


def accepts_fewer_heads(query: torch.Tensor) -> bool:
    """Whether attention on a GPU takes fewer heads of keys than of queries without copies of them. Kernels for half
    types do, all of them up to a head size of 128; the others would store all scores."""
    size = query.shape[-1]
    return query.is_cuda and query.dtype.itemsize == 2 and isinstance(size, int) and size % 8 == 0 and size <= 128
