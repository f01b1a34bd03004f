"""Shields calls in other threads from what ``torch.export`` replaces for the whole process during a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx._symbolic_trace import _Patcher

from .patches import replaced
from .turns import ThisThread

_before_trace: tuple[bool, bool] | None = None


def libraries() -> tuple[bool, bool]:
    """Returns whether oneDNN and cuDNN are enabled, ignoring that the exporter disables them for all threads during a
    trace."""
    return _before_trace or _libraries_now()


def switched_off() -> bool:
    """Whether a running trace may have disabled libraries."""
    return _before_trace is not None


def _libraries_now() -> tuple[bool, bool]:
    return torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()


@contextmanager
def shielded() -> Iterator[None]:
    """Context manager around a trace, in which the tracer's replacements of methods of ``nn.Module`` only affect calls
    of this thread. Otherwise the tracer would record the modules that other threads call."""
    global _before_trace
    here, own = ThisThread(), _Patcher.patch_method

    @functools.wraps(own)
    def patch_method(patcher: Any, cls: type, name: str, new: Callable[..., Any], *rest: Any, **named: Any) -> None:
        own(patcher, cls, name, _chosen(here, new, getattr(cls, name)) if here else new, *rest, **named)

    _before_trace = _libraries_now()
    try:
        with replaced([(_Patcher, "patch_method", patch_method)]):
            yield
    finally:
        here.over = True
        _before_trace = None


def _chosen(here: ThisThread, own: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(other)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (own if here else other)(*args, **kwargs)

    return choose
