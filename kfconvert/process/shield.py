"""Limits the process-wide effects of a trace and its trial runs on calls in other threads."""

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
_before_trials: bool | None = None


def libraries() -> tuple[bool, bool]:
    """Returns whether oneDNN and cuDNN are enabled, ignoring that the exporter disables them for all threads during a
    trace."""
    return _before_trace or _libraries_now()


def switched_off() -> bool:
    """Whether a running trace may have disabled libraries."""
    return _before_trace is not None


def _libraries_now() -> tuple[bool, bool]:
    return torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()


def is_cudnn_attention_enabled() -> bool:
    """Returns the user's setting of ``torch.backends.cuda.enable_cudnn_sdp``, ignoring
    ``without_cudnn_attention``."""
    return torch._C._get_cudnn_sdp_enabled() if _before_trials is None else _before_trials


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Context manager in which ``scaled_dot_product_attention`` uses other kernels than cuDNN's, in all threads.

    cuDNN compiles a plan for each shape: 30 to 170 ms on an H200, where a forward takes 15 to 40 ms. Trial runs have
    many shapes, most of them once.
    """
    global _before_trials
    _before_trials = torch._C._get_cudnn_sdp_enabled()
    others = torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled
    torch._C._set_sdp_use_cudnn(_before_trials and not any(each() for each in others))
    try:
        yield
    finally:
        torch._C._set_sdp_use_cudnn(_before_trials)
        _before_trials = None


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
