"""What a trace finds in the place of distributed parameters: the shards of this rank, which are plain tensors.

Code that computes with distributed parameters takes their shards, computes with these, and calls collectives on what
comes out (as tensor-parallel models of transformers do); code that makes distributed tensors of the results
redistributes them by collectives. So the graph has plain tensors and collectives only.
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
    """Within the block, ``model`` has its shards for parameters; yields the places of these: path and name."""
    found = [
        (path, module._parameters, name, parameter)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if shard_of(parameter) is not None
    ]
    if not found:
        yield frozenset()
        return
    # One parameter that is in two places stays one.
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
    """The exporter puts a call into the graph that makes a distributed tensor, and fails at its arguments; what is
    computed with its shard is in the graph by itself."""
    here = ThisThread()

    def emitted(**given: Any) -> None:
        if not here:
            emit(**given)

    return emitted
