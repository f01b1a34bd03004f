"""The original forward of a converted model in train mode, compiled by the backend "kfconvert"."""

from __future__ import annotations

import logging
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError
from torch.nn.parallel import DistributedDataParallel

from .backend import compile_graph

_UNCOMPILED = "TorchDynamo ran it uncompiled; TORCH_LOGS=recompiles,graph_breaks shows why"


def _is_no_metric(record: logging.LogRecord) -> bool:
    """Whether Dynamo logs something else than that its metrics cannot contain a method that it ignores."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, TypeError) and "_lru_cache_wrapper is not JSON serializable" in str(error))


# Torch 2.11 would log a stack in each compilation with ``ignore_logger_methods``.
logging.getLogger("torch._dynamo.metrics_context").addFilter(_is_no_metric)


class CompiledForward:
    """Compiles the original forward in the first call. Copies and pickles compile it again.

    Args:
        records: whether to record CUDA graphs where they save time.
    """

    def __init__(self, records: bool = True) -> None:
        self._records = records
        # Dynamo limits the compilations of each code object, which models must not share.
        self._compiled = torch.compile(FunctionType(_forward.__code__.replace(), globals()), backend=self._graph)
        self._failure: str | None = None
        self._graphs_run = 0

    def __call__(self, model: Any, own_forward: Any, args: Any, kwargs: Any) -> tuple[bool, Any, str | None]:
        """Returns whether the forward has run, its outputs, and the reason if a part was not compiled. Otherwise the
        caller runs the original. ``own_forward`` is the original forward of ``model``; None for the one of its
        class."""
        if self._failure is not None:
            return False, None, self._failure
        if _repeats_uncompiled():
            return False, None, "backward repeats a forward that ran without gradients"
        # A method of transformers that would be a graph break. By default, Dynamo does not detect hooks added later.
        once = getattr(logging.Logger, "warning_once", None)
        options = {"ignore_logger_methods": {once} if once else set(), "skip_nnmodule_hook_guards": False}
        if _has_small_buckets():
            options["optimize_ddp"] = False
        try:
            before = self._graphs_run
            with torch._dynamo.config.patch(options):
                outputs = self._compiled(model, own_forward, args, kwargs)
            return True, outputs, self._failure or (None if self._graphs_run > before else _UNCOMPILED)
        except TorchDynamoException as error:
            reason = _reason(getattr(error, "inner_exception", error))
            if not isinstance(error, TorchRuntimeError):  # which concerns these arguments only
                self._failure = reason
            return False, None, reason

    def _graph(self, module: fx.GraphModule, inputs: list[Any]) -> Any:
        """Compiles a graph. If that fails, this call runs it uncompiled: code before a graph break has already run, and
        must not run again in the original forward. Later calls run the original."""
        try:
            compiled = compile_graph(module, inputs, self._records)
        except Exception as error:  # the compiler may raise anything
            self._failure = _reason(error)
            return module.forward

        def run(*args: Any) -> Any:
            self._graphs_run += 1
            return compiled(*args)

        return run

    def __reduce__(self) -> tuple[Any, ...]:
        return CompiledForward, (self._records,)


def _has_small_buckets() -> bool:
    """Whether DistributedDataParallel makes this call, with buckets for which Dynamo cannot split graphs."""
    active = DistributedDataParallel._get_active_ddp_module()
    return active is not None and active.bucket_bytes_cap < torch.distributed._DEFAULT_FIRST_BUCKET_BYTES


def _repeats_uncompiled() -> bool:
    """Whether a checkpoint with ``use_reentrant=True`` repeats its forward, which ran without gradients and so
    uncompiled: compiled code would draw other random numbers. Other checkpoints have hooks for saved tensors."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch._C._current_graph_task_id() != -1 and hooks is None


def _reason(error: BaseException) -> str:
    return f"torch.compile failed: {type(error).__name__}: {str(error).strip()}".partition("\n")[0][:300]


def _forward(model, own_forward, args, kwargs):
    outputs = type(model).forward(model, *args, **kwargs) if own_forward is None else own_forward(*args, **kwargs)
    if not hasattr(getattr(model, "config", None), "get_text_config") or not isinstance(outputs, dict):
        return outputs
    # A language model of transformers that returns a loss: without the logits as an output, nothing computes them.
    if "LM" not in type(model).__name__ and "ConditionalGeneration" not in type(model).__name__:
        return outputs
    logits, classes = outputs.get("logits"), getattr(model.config.get_text_config(), "vocab_size", None)
    if outputs.get("loss") is None or logits is None or logits.shape[-1] != classes:
        return outputs
    return type(outputs)(**{name: value for name, value in outputs.items() if name != "logits"})
