"""Compiled or traced calls of a converted model: they use the original forward, and cause one warning.

A compiled program of fused operators was slower than both the converted model and the compiled original in every row of
``benchmarks/history/2026-11-28.md``. Only ``kfconvert.export`` traces the program.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .freezing import FrozenError
from .original_forwards import originals_wanted

if TYPE_CHECKING:
    from .guarded import GuardedForward


class ScriptingError(AttributeError):
    """A converted model was passed to ``torch.jit.script``; the message names the alternative in one line."""


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


def traced(guarded: GuardedForward, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the outputs of a traced call."""
    if torch.compiler.is_dynamo_compiling():
        _prepare_original(id(guarded))
    elif torch._C._get_tracing_state():
        with _untraced():
            _warn(guarded)
    elif guarded.exported is not None:
        return guarded.exported(args, kwargs)
    else:
        frozen = guarded.frozen
        if frozen is not None and frozen.host_bytes:
            raise FrozenError(
                f"kfconvert.freeze moved weights of {frozen.name} to host memory, and torch.export has already "
                "replaced them by tensors without data: use kfconvert.export"
            )
        _warn(guarded)
    return guarded.original(*args, **kwargs)


@torch.compiler.assume_constant_result
def _prepare_original(address: int) -> None:
    """Call ``_warn`` for the guarded forward at ``address``: before torch 2.12, Dynamo passes objects to functions
    with constant results as their ``id()``, and guards on it."""
    _warn(ctypes.cast(address, ctypes.py_object).value)


def _warn(guarded: GuardedForward) -> None:
    """Warn once per model that a compiler traces its original forward. Train mode runs the original anyway."""
    if guarded.frozen is not None:
        guarded.frozen.bring_back("a compiler reads them")
    if not (originals_wanted() or guarded.model.training):
        guarded.notices.compilers.give()


@contextmanager
def _untraced() -> Iterator[None]:
    """Context manager in which torch.jit.trace records nothing."""
    library: Any = torch._C  # the stubs lack one of these functions
    state = library._get_tracing_state()
    library._set_tracing_state(None)
    try:
        yield
    finally:
        library._set_tracing_state(state)


class Notice:
    """The warnings of one model about compilers, each given once."""

    def __init__(self, model: str):
        self.model, self.given, self.given_for_inference = model, False, False

    def give(self) -> None:
        """Warn that a compiler gets the original forward."""
        if not self.given:
            self.given = True
            warnings.warn(
                f"kfconvert: torch.compile, torch.export and torch.jit.trace get the original forward of {self.model}, "
                "without its fusions. The converted model is faster uncompiled; kfconvert.export writes a program with "
                "the fused operators.",
                RuntimeWarning,
                stacklevel=2,
            )

    def give_for_inference(self, reason: str) -> None:
        """Warn that gradients of an exported program may differ from those of the model."""
        if not self.given_for_inference:
            self.given_for_inference = True
            warnings.warn(
                f"kfconvert: the exported program of {self.model} is for inference only, its gradients may differ: "
                f"{reason}.",
                RuntimeWarning,
                stacklevel=2,
            )


def refuse_scripting() -> NoReturn:
    """Raise on behalf of the globals of a guarded forward, which ``torch.jit.script`` reads first.

    Raises:
        ScriptingError: always; as an AttributeError it means for other callers that the attribute does not exist.
    """
    raise ScriptingError(
        "torch.jit.script cannot compile the forward of a converted model: script the original model instead"
    )
