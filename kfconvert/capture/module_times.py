"""Times the calls of the modules of a model, by hooks."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..accuracy import model_outputs
from ..inputs import ExampleCall


def seconds_within(model: nn.Module, call: ExampleCall) -> dict[nn.Module, float]:
    """Return the seconds of each module in one run of ``call``; for a module that is not called itself, such as a list
    of layers, the sum over its children.

    Raises:
        Exception: any error of the model for this call.
    """
    clock = Clock("cuda" if any(tensor.is_cuda for tensor in call.tensors()) else "cpu")
    with timed_modules(model, clock) as spans:
        model_outputs(model, call.args, call.kwargs, call.method)
    by_path = clock.totals(spans)
    taken = {module: by_path[path] for path, module in model.named_modules() if path in by_path}
    for module in reversed(list(model.modules())):  # parents come before their children
        if module not in taken:
            taken[module] = sum(taken.get(child, 0.0) for child in module.children())
    return taken


class Clock:
    """Time stamps on the host or, on CUDA, in the current stream."""

    def __init__(self, device: str):
        self._is_cuda = device == "cuda"

    def now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def totals(self, spans: list[tuple[Any, Any, Any]]) -> dict[Any, float]:
        """Returns the seconds of each key of ``spans`` (key, begin, end)."""
        if self._is_cuda:
            torch.cuda.synchronize()
        found: dict[Any, float] = defaultdict(float)
        for key, begin, end in spans:
            found[key] += begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin
        return found


@contextmanager
def timed_modules(model: nn.Module, clock: Clock) -> Iterator[list[tuple[Any, Any, Any]]]:
    """Context manager that times calls of the modules of ``model``: the list gets (path, begin, end) of each call."""
    spans: list[tuple[Any, Any, Any]] = []
    begun: list[Any] = []

    def before(module: nn.Module, args: Any) -> None:
        begun.append(clock.now())

    def after(path: str) -> Callable[..., None]:
        return lambda module, args, output: spans.append((path, begun.pop(), clock.now()))

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after(path)).remove)
        yield spans
