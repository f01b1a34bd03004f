"""What traces the forward of a converted model: torch.compile, torch.export, torch.jit. See ``traced``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch


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


class Notice:
    """Tells once that a model is traced without its fusions, and once that it is exported for inference only."""

    def __init__(self, model: str):
        self.model, self.given, self.given_for_inference = model, False, False
        self._heard: list[str] | None = None

    @contextmanager
    def heard(self) -> Iterator[list[str]]:
        """Within the block, reasons are collected in place of the warning."""
        reasons: list[str] = []
        self._heard = reasons
        try:
            yield reasons
        finally:
            self._heard = None

    def give(self, reason: str) -> None:
        """Warn at the first call."""
        if self._heard is not None:
            self._heard.append(reason)
        elif not self.given:
            self.given = True
            warnings.warn(
                f"kfconvert: a compiler (torch.compile, torch.export or torch.jit.trace) gets the original forward of "
                f"{self.model}, without what was fused in it: {reason}.",
                RuntimeWarning,
                stacklevel=2,
            )

    def give_for_inference(self, reason: str) -> None:
        """Warn at the first call that gradients of an exported program may not be those of the model."""
        if self._heard is None and not self.given_for_inference:
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
