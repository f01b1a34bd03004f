"""Arithmetic of free sizes that a trace has done before, taken from memory.

The shapes and strides of the layers of a model are alike: of a hundred thousand operations on free sizes that a trace
of twenty layers asks for, a few thousand differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode

from ..process import replaced

# The operations that computing sizes, strides and contiguity takes.
_OPERATIONS = (
    "_add", "_sub", "_mul", "_int_floordiv", "_mod", "_sym_max", "_sym_min", "_eq", "_ne", "_lt", "_le", "_gt", "_ge",
    "_and_", "_or_",
)  # fmt: skip

Operation = Callable[[SymNode, Any], Any]


@contextmanager
def known_sizes() -> Iterator[None]:
    """Within the block, the same operation on the same expressions of one environment is done once."""
    with replaced([(SymNode, name, _remembering(getattr(SymNode, name))) for name in _OPERATIONS]):
        yield


def _remembering(operation: Operation) -> Operation:
    # A result and what it was made of, by the identities of that, which are those of nothing else while it is held.
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def remember(self: SymNode, other: Any) -> Any:
        # While the tracer records, an operation becomes a node of the graph. Other kinds of nodes have no expressions.
        if type(other) is not SymNode or self.shape_env is None or get_proxy_mode() is not None:
            return operation(self, other)
        parts = self._expr, other._expr, self.shape_env
        # The tracer may have found since that one size is another, which changes what it makes of both.
        key = (*map(id, parts), len(self.shape_env.replacements), self._optimized_summation, other._optimized_summation)
        found = known.get(key)
        if found is None:
            found = known[key] = operation(self, other), parts
        return found[0]

    return remember
