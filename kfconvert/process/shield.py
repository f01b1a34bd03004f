"""Shields other threads from the process-wide replacements of ``torch.export`` during a trace."""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.fx._symbolic_trace import _Patcher

from .turns import ThisThread

# (holder, name) of functions that the exporter replaces.
_REPLACED = (
    (nn.Module, "__call__"), (nn.Module, "__getattr__"),
    (builtins, "max"), (builtins, "min"), (math, "pow"),
)  # fmt: skip


_before_trace: tuple[bool, bool] | None = None


def libraries() -> tuple[bool, bool]:
    """Returns whether oneDNN and cuDNN are enabled, ignoring that the exporter disables them for all threads during a
    trace."""
    return _before_trace or _libraries_now()


def switched_off() -> bool:
    """Whether a running trace may have disabled libraries."""
    return _before_trace is not None


def is_of_trace(value: Any, expected: Any) -> bool:
    """Whether ``value`` is the exporter's, or a shield's, replacement of ``expected`` during a trace."""
    while value is not expected:
        if isinstance(value, functools.partial) and value.func.__module__ == "torch._export.non_strict_utils":
            value = value.keywords.get("real_callable")  # the exporter replaces max and min in builtins
            continue
        if getattr(value, "__globals__", {}).get("__name__") not in ("torch.fx._symbolic_trace", __name__):
            return False
        value = getattr(value, "__wrapped__", None)
    return True


def _libraries_now() -> tuple[bool, bool]:
    return torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()


class Shield:
    """The state around a trace: the functions that other threads must see."""

    def __enter__(self) -> Shield:
        global _before_trace
        self._originals = [(holder, name, getattr(holder, name)) for holder, name in _REPLACED]
        _before_trace = _libraries_now()
        self._here, self._patch_method = ThisThread(), _Patcher.patch_method
        setattr(_Patcher, "patch_method", self._patched_for_this_thread())  # noqa: B010 - says mypy
        self._modes = torch._ops._mode_stack_state_for_pre_dispatch
        torch._ops._mode_stack_state_for_pre_dispatch = _ModesOfThread(self._here, self._modes)  # type: ignore[assignment]
        return self

    def __exit__(self, *_: Any) -> None:
        global _before_trace
        torch._ops._mode_stack_state_for_pre_dispatch = self._modes
        setattr(_Patcher, "patch_method", self._patch_method)  # noqa: B010
        for holder, name, original in self._originals:
            # An interrupt may end the exporter anywhere, also while it restores functions.
            found = getattr(holder, name)
            if found is not original and is_of_trace(found, original):
                setattr(holder, name, original)
        self._here.over = True
        _before_trace = None

    def _patched_for_this_thread(self) -> Callable[..., None]:
        """A variant of the tracer's method that replaces methods of all modules, which only affects calls of this
        thread."""
        here, own = self._here, self._patch_method

        @functools.wraps(own)
        def patch_method(patcher: Any, cls: type, name: str, new: Callable[..., Any], *rest: Any, **named: Any) -> None:
            own(patcher, cls, name, _chosen(here, new, getattr(cls, name)) if here else new, *rest, **named)

        return patch_method

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Context manager inside a trace in which other threads see the original functions.

        Otherwise the tracer would record modules that these threads call. At the end, the exporter's functions are in
        place again, so that the exporter can remove them.
        """
        here, changed = ThisThread(), []
        for holder, name, original in self._originals:
            replaced = getattr(holder, name)
            if replaced is not original:
                changed.append((holder, name, replaced, _chosen(here, replaced, original)))
        for holder, name, _, ours in changed:
            setattr(holder, name, ours)
        try:
            yield
        finally:
            for holder, name, replaced, ours in changed:
                if getattr(holder, name) is ours:
                    setattr(holder, name, replaced)
            here.over = True  # other code may have stored our function, to restore it later


class _ModesOfThread:
    """A thread-local stack of pre-dispatch modes. PyTorch has one stack per process. Printing a tensor leaves all
    modes, so another thread would remove the modes of a trace, and restore them after its end."""

    def __init__(self, here: ThisThread, others: Any):
        vars(self).update(_here=here, _own=type(others)(), _others=others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own if self._here else self._others, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own if self._here else self._others, name, value)


def _chosen(here: ThisThread, own: Callable[..., Any], other: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(other)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (own if here else other)(*args, **kwargs)

    return choose
