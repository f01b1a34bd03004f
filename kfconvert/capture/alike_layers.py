"""Traces a stack of alike layers by its first ones, and repeats the last of these in the graph for all others.

The exporter takes as long for each layer, and all layers after the first ones give the same nodes with other weights.
After the first layer, which may compute what all others use, three alike layers are traced. What differs between the
second and the third of these differs between all later ones: weights, the layer's place among arguments and outputs,
and the results of the layer before it. A run of the whole model shows whether later layers do the same (see
``layer_runs``), and the checks of a capture compare the graph with the model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from ..inputs import is_cache, is_equal, layers_of, set_tensor, tensors_of
from ..runtime import configurations
from .structure import groups

TRACED = 3
# With fewer layers left out, the time of a second trace, if layers differ, is not worth the gain.
_LEAST_LEFT_OUT = 3
_WINDOW = re.compile(r"window(_size)?$|attention_chunk|attn_chunk|local_att|global_att")


@dataclass(frozen=True)
class Stack:
    """The ``count`` layers of the list at ``path``. All layers after ``first`` are like that one."""

    path: str
    layers: nn.Module
    count: int
    first: int

    @property
    def traced(self) -> int:
        return self.first + 1 + TRACED


def stacks_of(model: nn.Module) -> list[Stack]:
    """Returns the outermost lists of modules with enough alike layers at their end. Without them, if a setting of the
    model is a window: its effect, which code may give to some layers only, is not visible in a short example."""
    found: list[Stack] = []
    settings = [vars(each) for each in (*configurations(model), *model.modules())]
    windows = (value for each in settings for name, value in each.items() if _WINDOW.search(name))
    if any(type(value) in (bool, int, list, tuple) and value for value in windows):
        return []
    lists = [value for each in settings for value in each.values() if type(value) in (list, tuple)]
    for path, module in model.named_modules():
        is_inner = any(path.startswith(f"{each.path}.") for each in found)
        if is_inner or type(module) not in (nn.ModuleList, nn.Sequential):
            continue
        layers = [each for each in module._modules.values() if each is not None]
        first = len(layers) - 1
        alike = next((each for each in groups(layers, type) if layers[-1] in each), [])
        while first > 0 and layers[first - 1] in alike and _are_numbered(layers, first - 1):
            first -= 1
        tensors = [id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())]
        # A list with a value for each layer.
        numbered = [value[first:] for value in lists if len(value) == len(layers)]
        if any(not is_equal(each, value[0]) for value in numbered for each in value):
            continue
        if len(layers) - first >= 1 + TRACED + _LEAST_LEFT_OUT and len(set(tensors)) == len(tensors):
            found.append(Stack(path, module, len(layers), first))
    return found


def _are_numbered(layers: list[nn.Module], number: int) -> bool:
    """Whether the integers of a layer equal those of the last one, which has the same structure, or differ as the
    numbers of the layers do."""
    distance = len(layers) - 1 - number
    pairs = zip(layers[number].modules(), layers[-1].modules())
    values = ((value, vars(two).get(name)) for one, two in pairs for name, value in vars(one).items())
    return all(type(two) is int and two - one in (0, distance) for one, two in values if type(one) is int)


@contextmanager
def shortened(stacks: Sequence[Stack]) -> Iterator[None]:
    """Context manager under which each list has only the layers to trace."""
    before = [stack.layers._modules for stack in stacks]
    try:
        for stack, modules in zip(stacks, before):
            stack.layers._modules = dict(list(modules.items())[: stack.traced])
        yield
    finally:
        for stack, modules in zip(stacks, before):
            stack.layers._modules = modules


def fill_caches(stacks: Sequence[Stack], values: Any) -> None:
    """Gives the caches in ``values``, outputs of a shortened model, tensors for the layers that it left out."""
    for cache in filter(is_cache, pytree.tree_leaves(values, is_leaf=is_cache)):
        flags = vars(cache).get("is_updated")  # of an EncoderDecoderCache, by layer
        for nested in (cache, *(value for value in vars(cache).values() if is_cache(value))):
            if "layers" in vars(nested):
                filled = _fill(stacks, nested)
                if filled is not None and flags:
                    flags.update(dict.fromkeys(range(filled.traced, filled.count), flags[filled.traced - 1]))


def _fill(stacks: Sequence[Stack], cache: Any) -> Stack | None:
    """Returns the stack of ``cache``; None if it is unknown."""
    layers = layers_of(cache)
    for stack in stacks:
        if len(layers) not in (stack.traced, stack.count):
            continue
        last = layers[stack.traced - 1]
        markers = [(name, tensor.clone()) for name, tensor in tensors_of(last)]
        for index in range(stack.traced, stack.count):
            if index < len(layers) and (type(layers[index]) is not type(last) or [*tensors_of(layers[index])]):
                continue
            layer = copy.copy(last)
            vars(layer).update({name: dict(value) for name, value in vars(last).items() if type(value) is dict})
            for name, marker in markers:
                set_tensor(layer, name, marker)
            layers[index : index + 1] = [layer]
        return stack
    return None
