"""What torch.compile, torch.export and torch.jit.trace get of a converted model: the original forward, and one warning.

A compiled program of fused operators was slower than both the converted model and the compiled original in every row of
``benchmarks/RESULTS.md``. Only ``kfconvert.export`` traces the program.
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
    """A converted model was given to ``torch.jit.script``; the message says in one line what to do instead."""


def traced_here() -> bool:
    """Whether torch.compile, torch.export or torch.jit.trace traces the calls of this very thread.

    ``torch.compiler.is_compiling()`` is true in all threads while one exports, as every conversion does.
    """
    if not (torch.compiler.is_compiling() or torch._C._get_tracing_state()):
        return False
    # While Dynamo traces this function, it knows that this is true, and so does not trace the last line.
    if torch.compiler.is_dynamo_compiling() or torch._C._get_tracing_state():
        return True
    return torch._C._len_torch_dispatch_stack() > 0


def traced(guarded: GuardedForward, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The outputs of a call that is traced."""
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
    """``_warn`` for the guarded forward at ``address``: before torch 2.12, Dynamo passes no objects to functions whose
    result it takes for a constant, but their ``id()``, on which it then guards."""
    _warn(ctypes.cast(address, ctypes.py_object).value)


def _warn(guarded: GuardedForward) -> None:
    """Warn once a model that its original is traced. In train mode the original runs in any case."""
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
    """The warnings that compilers of one model cause, each given once."""

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
    """Called in place of the globals of a guarded forward, which ``torch.jit.script`` asks for first.

    Raises:
        ScriptingError: always; as an AttributeError it tells others who ask that there is no such attribute.
    """
    raise ScriptingError(
        "torch.jit.script cannot compile the forward of a converted model: script the original model instead"
    )
