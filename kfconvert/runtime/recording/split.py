"""Calls in two parts: a recording covers the first, and the second writes a large output without a copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ..state.derived import memory_of

# A GPU copies fewer bytes in the time in which the host launches an operator.
LEAST_BYTES = 2**24

Call = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Split:
    """Computes flat outputs from flat inputs. ``body`` returns them with the inputs of ``tail``, a slice ``inputs``, in
    place of its result. In the code of a program, the tail is an operator or the name of a plan."""

    body: Callable[..., Sequence[Any]]
    tail: Any
    inputs: slice

    def __call__(self, leaves: list[Any]) -> Sequence[Any]:
        return tuple(value() if isinstance(value, partial) else value for value in self.unfinished(leaves))

    def unfinished(self, leaves: list[Any]) -> Sequence[Any]:
        """Return the outputs with a call of the tail, a ``partial``, in place of its result."""
        found = list(self.body(leaves))
        found[self.inputs] = [partial(_computed, self.tail, *found[self.inputs])]
        return found

    def with_plans(self, plans: Any, body: Call) -> Split:
        return Split(body, getattr(plans, self.tail) if isinstance(self.tail, str) else self.tail, self.inputs)


def _computed(tail: Callable[..., Tensor], *inputs: Any) -> Tensor:
    found = tail(*inputs)
    is_input = memory_of(found) in [memory_of(value) for value in inputs if isinstance(value, Tensor)]
    return found.clone() if is_input else found


def split_code(module: fx.GraphModule) -> Split | None:
    """Take the last call off ``module``, and return the code of both parts. None unless the call is a fused module or a
    linear layer, and its result is one output and has no other use."""
    output = module.graph.output_node()
    last, outputs = output.prev, list[Any](output.args[0])  # type: ignore[arg-type]
    is_operator = last.op == "call_module" or (last.target is torch._C._nn.linear and not last.kwargs)
    if not is_operator or list(last.users) != [output] or outputs.count(last) != 1:
        return None
    index = outputs.index(last)
    output.args = ((*outputs[:index], *last.args, *outputs[index + 1 :]),)
    module.graph.erase_node(last)
    module.recompile()
    return Split(type(module).forward, last.target, slice(index, index + len(last.args)))
