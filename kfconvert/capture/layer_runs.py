"""Compares the layers of a stack in a run of the whole model: which functions they call, with which values.

A trace of the first layers does not show what code does for later ones only, by their number or their position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..inputs import ExampleCall
from .alike_layers import Stack, small_windows

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)


def run_alike(model: nn.Module, call: ExampleCall, stacks: Sequence[Stack]) -> list[Stack]:
    """Returns the ``stacks`` whose later layers do in ``call`` what the traced ones of their kinds do. Where the call
    does not use the layers of a stack, there is nothing to compare."""
    if not stacks:
        return []
    runs, given = [_Run(stack) for stack in stacks], call.copied()
    with ExitStack() as contexts, torch.no_grad(), small_windows(model):
        for run in runs:
            run.watch(contexts)
        model(*given.args, **given.kwargs)
    return [stack for stack, run in zip(stacks, runs) if run.are_alike()]


class _Run(TorchFunctionMode):
    """Records calls in segments: before the layers, then for each layer its own calls and those after it."""

    def __init__(self, stack: Stack):
        super().__init__()
        self._stack, self._order = stack, list[int]()
        self._segments: list[list[Any]] = [[]]
        self._kept: list[Any] = []  # an object that is gone could have the identity of a later one
        self._made: dict[int, tuple[int, int, int]] = {}
        self._used: list[set[int]] = [set()]  # values from outside of each segment
        self._weights = {
            id(tensor): (number, name)
            for number, layer in enumerate(stack.layers.children())
            for name, tensor in (*layer.named_parameters(), *layer.named_buffers())
        }

    def watch(self, contexts: ExitStack) -> None:
        """Begins a segment at the start and at the end of each layer, and records calls, within ``contexts``."""
        for number, layer in enumerate(self._stack.layers.children()):
            contexts.enter_context(layer.register_forward_pre_hook(partial(self._begin, number)))
            contexts.enter_context(layer.register_forward_hook(partial(self._begin, None)))
        contexts.enter_context(self)

    def _begin(self, number: int | None, *_: Any) -> None:
        self._segments.append([])
        self._used.append(set())
        if number is not None:
            self._order.append(number)

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
        made, call, index = self._made.get(id(value), (-1, 0, 0))
        if made == place:
            return "own", call, index
        self._used[place].add(id(value))
        return "outer", id(value), place, made, call, index

    def are_alike(self) -> bool:
        """Whether later layers, and the calls between them, equal those of the traced layers of their kinds."""
        if not self._order:
            return True
        if self._order != list(range(self._stack.count)):
            return False
        uses = Counter(value for used in self._used for value in used)
        for number in range(self._stack.traced, self._stack.count):
            template = self._stack.template(number)
            are_same_before = self._stack.kinds[number - 1] == self._stack.kinds[template - 1]
            for segment in (2 * number, 2 * number + 1):
                other = segment - 2 * (number - template)
                found = [self._resolved(each, uses, are_same_before) for each in (segment, other)]
                if found[0] != found[1]:
                    return False
        return True

    def _resolved(self, place: int, uses: Counter[int], exactly: bool) -> list[Any]:
        """The calls of a segment. A result of the layer before is described by the distance, and ``exactly``, by its
        place there."""

        def resolved(given: Any) -> Any:
            if type(given) is not tuple or given[0] != "outer":
                return given
            _, value, _, made, call, index = given
            if place - made > 2 and (made > 0 or uses[value] > 1):
                return "shared", value
            if made <= 0:
                return ("argument",)  # of one layer
            return "made", place - made, *((call, index) if exactly else ())

        return [(function, [resolved(each) for each in given]) for function, given in self._segments[place]]
