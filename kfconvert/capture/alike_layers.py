"""Traces a stack of layers by its first ones, and repeats these in the graph for all others.

The exporter takes as long for each layer, and all layers of a kind give the same nodes with other weights. Traced are
the first layer, which may compute what all others use, and after it at least one layer of each kind, two of one kind.
What differs between these two differs between all layers: weights, the layer's place among arguments and outputs, and
the results of the layer before it. A run of the whole model shows whether later layers do the same (see
``layer_runs``), and the checks of a capture compare the graph with the model.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from ..inputs import is_cache, layers_of, set_tensor, tensors_of
from ..known_libraries import is_of_libraries
from ..process import forward_over
from ..runtime import configurations
from .structure import groups

# With fewer layers left out, the time of a second trace, if layers differ, is not worth the gain.
_LEAST_LEFT_OUT = 3
_WINDOW = re.compile(r"window(_size)?$|attention_chunk|attn_chunk|local_att|global_att")
_SMALLEST_WINDOW = 2
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class Stack:
    """The list of layers at ``path``. Layers of one kind have the same number in ``kinds``. The first ``traced`` layers
    are traced; all later ones are of the kinds of these without the first one."""

    path: str
    layers: nn.Module
    kinds: tuple[int, ...]
    traced: int

    @property
    def count(self) -> int:
        return len(self.kinds)

    def template(self, index: int) -> int:
        """Returns the last traced layer of the kind of layer ``index``."""
        return max(each for each in range(1, self.traced) if self.kinds[each] == self.kinds[index])


def stacks_of(model: nn.Module) -> list[Stack]:
    """Returns the outermost lists of modules with few kinds of layers, in models of known libraries: other code may
    treat layers differently in ways that a short run does not show."""
    found: list[Stack] = []
    if not is_of_libraries(model):
        return found
    lists = [value for each in _settings(model) for value in each.values() if type(value) in (list, tuple)]
    for path, module in model.named_modules():
        is_inner = any(path.startswith(f"{each.path}.") for each in found)
        if is_inner or type(module) not in (nn.ModuleList, nn.Sequential):
            continue
        layers = [each for each in module._modules.values() if each is not None]
        tensors = [id(each) for layer in layers for each in (*layer.parameters(), *layer.buffers())]
        kinds = _kinds(layers, [value for value in lists if len(value) == len(layers)])
        traced = _least_traced(kinds)
        if len(layers) - traced >= _LEAST_LEFT_OUT and len(set(tensors)) == len(tensors):
            found.append(Stack(path, module, kinds, traced))
    return found


def _settings(model: nn.Module) -> list[dict[str, Any]]:
    """The attributes of the configurations and of the modules of ``model``."""
    return [vars(each) for each in (*configurations(model), *model.modules())]


def _kinds(layers: list[nn.Module], lists: list[Sequence[Any]]) -> tuple[int, ...]:
    """The kind of each layer: its structure and its values in ``lists``, which have one for each layer. The first
    layers are of kinds for themselves if their integers neither equal those of later ones nor number the layers."""
    of_layer = {id(layer): number for number, group in enumerate(groups(layers, type)) for layer in group}
    keys = [(of_layer[id(layer)], *(_key(value[index]) for value in lists)) for index, layer in enumerate(layers)]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    kinds = [numbers[key] for key in keys]
    last = {kind: index for index, kind in enumerate(kinds)}
    first = next(
        (index for index in reversed(range(len(layers))) if not _are_numbered(layers, index, last[kinds[index]])), -1
    )
    return tuple(-1 - index if index <= first else kind for index, kind in enumerate(kinds))


def _key(value: Any) -> Any:
    return (type(value), repr(value)) if isinstance(value, _PLAIN) else id(value)


def _are_numbered(layers: list[nn.Module], index: int, other: int) -> bool:
    """Whether the integers of two layers of the same structure are equal, or differ as the numbers of the layers."""
    pairs = zip(layers[index].modules(), layers[other].modules())
    values = ((value, vars(two).get(name)) for one, two in pairs for name, value in vars(one).items())
    return all(type(two) is int and two - one in (0, other - index) for one, two in values if type(one) is int)


def _least_traced(kinds: tuple[int, ...]) -> int:
    for traced in range(3, len(kinds)):
        known = kinds[1:traced]
        if len(set(known)) < len(known) and set(kinds[traced:]).issubset(known):
            return traced
    return len(kinds)


@contextmanager
def small_windows(model: nn.Module) -> Iterator[None]:
    """Context manager under which windows of attention have ``_SMALLEST_WINDOW`` tokens: inputs are longer than these,
    so it shows which layers have one.

    Raises:
        ValueError: a window has several numbers.
    """
    named = [(held, name, value) for held in _settings(model) for name, value in held.items() if _WINDOW.search(name)]
    if any(isinstance(value, (list, tuple)) and value for *_, value in named):
        raise ValueError("a window has several numbers")
    windows = [each for each in named if type(each[-1]) is int and each[-1] > _SMALLEST_WINDOW]
    try:
        for held, name, _ in windows:
            held[name] = _SMALLEST_WINDOW
        yield
    finally:
        for held, name, value in windows:
            held[name] = value


@contextmanager
def shortened(model: nn.Module, stacks: Sequence[Stack]) -> Iterator[None]:
    """Context manager under which each list has only the layers to trace. Caches that ``model`` then returns have
    tensors for the other layers, too."""
    if not stacks:
        yield
        return
    original, before = model.forward, [stack.layers._modules for stack in stacks]

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = original(*args, **kwargs)
        _fill_caches(stacks, outputs)
        return outputs

    try:
        for stack, modules in zip(stacks, before):
            stack.layers._modules = dict(list(modules.items())[: stack.traced])
        with forward_over(model, forward):
            yield
    finally:
        for stack, modules in zip(stacks, before):
            stack.layers._modules = modules


def _fill_caches(stacks: Sequence[Stack], values: Any) -> None:
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
        markers = {
            index: [(name, tensor.clone()) for name, tensor in tensors_of(layers[index])]
            for index in {stack.template(each) for each in range(stack.traced, stack.count)}
        }
        for index in range(stack.traced, stack.count):
            template = layers[stack.template(index)]
            if index < len(layers) and (type(layers[index]) is not type(template) or [*tensors_of(layers[index])]):
                continue
            layer = copy.copy(template)
            vars(layer).update({name: dict(value) for name, value in vars(template).items() if type(value) is dict})
            for name, marker in markers[stack.template(index)]:
                set_tensor(layer, name, marker)
            layers[index : index + 1] = [layer]
        return stack
    return None
