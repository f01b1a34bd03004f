"""The original forward of a converted model in train mode, compiled by the backend "kfconvert"."""

from __future__ import annotations

import logging
from types import FunctionType
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError

from .backend import compile_graph


class CompiledForward:
    """Compiles the original forward in the first call. Copies and pickles compile it again."""

    def __init__(self) -> None:
        # Dynamo limits the compilations of each code object, which models must not share.
        self._compiled = torch.compile(FunctionType(_forward.__code__.replace(), globals()), backend=compile_graph)
        self._failure: str | None = None

    def __call__(self, model: Any, own_forward: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, str | None]:
        """Returns (outputs, None), or None and the reason why the original must run uncompiled. ``own_forward`` is the
        original forward of ``model``; None for the one of its class."""
        if self._failure is not None:
            return None, self._failure
        # A method of transformers that would be a graph break. By default, Dynamo does not detect hooks added later.
        once = getattr(logging.Logger, "warning_once", None)
        options = {"ignore_logger_methods": {once} if once else set(), "skip_nnmodule_hook_guards": False}
        try:
            with torch._dynamo.config.patch(options):
                return self._compiled(model, own_forward, args, kwargs), None
        except TorchDynamoException as error:
            cause = getattr(error, "inner_exception", error)
            reason = f"torch.compile failed: {type(cause).__name__}: {str(cause).strip()}".partition("\n")[0][:300]
            if not isinstance(error, TorchRuntimeError):  # which concerns these arguments only
                self._failure = reason
            return None, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledForward, ()


def _forward(model, own_forward, args, kwargs):
    outputs = type(model).forward(model, *args, **kwargs) if own_forward is None else own_forward(*args, **kwargs)
    if not hasattr(getattr(model, "config", None), "get_text_config") or not isinstance(outputs, dict):
        return outputs
    # A language model of transformers that returns a loss: without the logits as an output, nothing computes them.
    logits, classes = outputs.get("logits"), getattr(model.config.get_text_config(), "vocab_size", None)
    if outputs.get("loss") is None or logits is None or logits.shape[-1] != classes:
        return outputs
    return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})
