"""Compiled or traced calls of a converted model: they use the original forward, and cause one warning.

A compiled program of fused operators was slower than both the converted model and the compiled original in every row of
``benchmarks/history/2026-11-28.md``. Only ``kfconvert.export`` traces the program.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from .original_forwards import originals_wanted


def traced_here() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace traces the calls of this thread.

    ``torch.compiler.is_compiling()`` is true in all threads while one exports, as every conversion does.
    """
    if not (torch.compiler.is_compiling() or torch._C._get_tracing_state()):
        return False
    # Dynamo evaluates this to True while it traces the function, and so does not trace the last line.
    if torch.compiler.is_dynamo_compiling() or torch._C._get_tracing_state():
        return True
    return torch._C._len_torch_dispatch_stack() > 0


def traced(guarded: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the outputs of a traced call."""
    if torch.compiler.is_dynamo_compiling():
        _warn_in_dynamo(id(guarded))
    elif guarded.exported is not None:
        return guarded.exported(args, kwargs)
    else:
        _warn(guarded)
    return guarded.original(*args, **kwargs)


@torch.compiler.assume_constant_result
def _warn_in_dynamo(address: int) -> None:
    """Call ``_warn`` for the guarded forward at ``address``: before torch 2.12, Dynamo passes objects to functions
    with constant results as their ``id()``, and guards on it."""
    _warn(ctypes.cast(address, ctypes.py_object).value)


def _warn(guarded: Any) -> None:
    """Warn once per model that a compiler traces its original forward. Train mode runs the original anyway."""
    if guarded.is_converted and not (originals_wanted() or guarded.model.training):
        guarded.notices.compiled()
