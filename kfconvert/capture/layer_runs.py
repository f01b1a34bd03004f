"""Compares the layers of a stack in a run of the whole model: which functions they call, with which values.

A trace of the first layers does not show what code does for later ones only, by their number or their position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..inputs import ExampleCall
from .alike_layers import Stack

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


def run_alike(model: nn.Module, call: ExampleCall, stacks: Sequence[Stack]) -> list[Stack]:
    """Returns the ``stacks`` whose later layers do in ``call`` what the last traced one does. Where the call does not
    use the layers of a stack, there is nothing to compare."""
    found = []
    for stack in stacks:
        run = _Run(stack)
        given = call.copied()
        with run.hooked(), torch.no_grad(), run:
            model(*given.args, **given.kwargs)
        if not run.order or (run.order == list(range(stack.count)) and run.are_alike()):
            found.append(stack)
    return found


class _Run(TorchFunctionMode):
    """Records calls in segments: before the layers, then for each layer its own calls and those after it."""

    def __init__(self, stack: Stack):
        super().__init__()
        self._stack, self.order = stack, list[int]()
        self._segments: list[list[Any]] = [[]]
        self._kept: list[Any] = []  # an object that is gone could have the identity of a later one
        self._made: dict[int, tuple[int, int, int]] = {}
        self._used: list[set[int]] = [set()]  # values from outside of each segment
        self._weights = {
            id(tensor): (number, name)
            for number, layer in enumerate(stack.layers.children())
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
        }

    def hooked(self) -> Any:
        return _Hooks(self, list(self._stack.layers.children()))

    def begin(self, number: int | None = None) -> None:
        self._segments.append([])
        self._used.append(set())
        if number is not None:
            self.order.append(number)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = pytree.tree_leaves((args, kwargs or {}))
        segment = self._segments[-1]
        place = len(self._segments) - 1
        for index, each in enumerate(pytree.tree_leaves(result)):
            if isinstance(each, Tensor) and id(each) not in self._weights and id(each) not in map(id, given):
                self._made[id(each)] = place, len(segment), index
        self._kept.append((given, result))
        segment.append((function, [self._described(each, place) for each in given]))
        return result

    def _described(self, value: Any, place: int) -> Any:
        if not isinstance(value, Tensor):
            return value if type(value) in _PLAIN else str(type(value)) if callable(value) else repr(value)
        if id(value) in self._weights:
            number, name = self._weights[id(value)]
            return "weight", number - (place - 1) // 2, name
        made, call, index = self._made.get(id(value), (0, 0, 0))
        if made == place:
            return "own", call, index
        self._used[place].add(id(value))
        if place >= 2 and id(value) in self._used[place - 2]:
            return "shared", id(value)  # by all layers
        return ("made", made - place, call, index) if made else "outside"

    def are_alike(self) -> bool:
        """Whether later layers, and the calls between them, equal those of the last traced layer."""
        last = 2 * self._stack.traced - 1
        own, between = self._segments[last], self._segments[last - 1]
        later = range(self._stack.traced, self._stack.count)
        return all(self._segments[2 * number + 1] == own and self._segments[2 * number] == between for number in later)


class _Hooks:
    """Context manager under which ``run`` begins a segment at the start and at the end of each layer."""

    def __init__(self, run: _Run, layers: list[nn.Module]):
        self._run, self._layers = run, layers

    def __enter__(self) -> None:
        self._handles = [handle for number, layer in enumerate(self._layers) for handle in self._hooks(number, layer)]

    def _hooks(self, number: int, layer: nn.Module) -> Iterator[Any]:
        yield layer.register_forward_pre_hook(lambda *_: self._run.begin(number))
        yield layer.register_forward_hook(lambda *_: self._run.begin())

    def __exit__(self, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
