"""Replaces distributed parameters in a trace by the shards of this rank, which are plain tensors.

Code with distributed parameters computes with their shards and calls collectives on the results (as tensor-parallel
models of transformers do); code that builds distributed tensors from the results redistributes them by collectives.
The graph therefore has only plain tensors and collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch._export import wrappers

from ..process import ThisThread, replaced, shard_of


@contextmanager
def local_shards(model: nn.Module) -> Iterator[frozenset[tuple[str, str]]]:
    """Context manager that replaces parameters of ``model`` by shards; yields their places: path and name."""
    found = [
        (path, module._parameters, name, parameter)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if shard_of(parameter) is not None
    ]
    if not found:
        yield frozenset()
        return
    # A parameter at two places stays one parameter.
    shards: dict[int, Any] = {id(p): nn.Parameter(shard_of(p).detach(), False) for *_, p in found}
    try:
        for _, store, name, parameter in found:
            store[name] = shards[id(parameter)]
        with replaced([(wrappers, "_emit_flat_apply_call", _unless_here(wrappers._emit_flat_apply_call))]):
            yield frozenset((path, name) for path, _, name, _ in found)
    finally:
        for _, store, name, parameter in found:
            store[name] = parameter


def _unless_here(emit: Callable[..., None]) -> Callable[..., None]:
    """The exporter adds the call that builds a distributed tensor to the graph, and fails at its arguments. The graph
    has the computation with the shard anyway."""
    here = ThisThread()

    def emitted(**given: Any) -> None:
        if not here:
            emit(**given)

    return emitted
