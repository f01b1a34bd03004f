"""The region of a block, from what was recorded of it while a model around it was traced, with no trace of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ...graph import Aliases, aten, has_effect
from ...inputs import CallForm, ExampleCall, described
from ...region import Dimensions, Guard, Region, guard_from_placeholders
from ...runtime import implied
from .traced_call import Recording


def region_of_block(
    module: nn.Module, call: ExampleCall, dimensions: Mapping[str, Dimensions], recordings: Sequence[Recording]
) -> Region | None:
    """What ``trace`` of ``module`` as called in ``call`` finds, from the last of the ``recordings`` that fits, whose
    trace began closest to the module; None where none fits.

    Its sizes are free where ``dimensions`` says so. Where the traced model limits them, nothing tells whether the
    module does: it has to be traced by itself.
    """
    try:
        form = CallForm(module.forward, call.args, call.kwargs)
    except ValueError:
        return None
    fitting = (_region(known, form, call, dimensions) for known in reversed(recordings) if known.module is module)
    return next(filter(None, fitting), None)


def _region(known: Recording, form: CallForm, call: ExampleCall, dimensions: Mapping[str, Dimensions]) -> Region | None:
    leaves, traced = (form.leaves(args, kwargs) for args, kwargs in ((call.args, call.kwargs), known.arguments))
    if traced is None or not all(map(_is_alike, traced, leaves)):
        return None
    tensors = [leaf for leaf in traced if isinstance(leaf, Tensor)]
    if len(set(map(id, tensors))) < len(tensors):
        return None  # one value in this graph, two in other calls
    graph, copies, slots, inputs = fx.Graph(), {}, {}, []
    for (path, name), node in known.state.items():
        if node not in copies:
            copies[node] = _placeholder(graph, f"p_{path}_{name}".replace(".", "_"), node)
            slots[copies[node].name] = (path, name)
    for name, leaf in zip(_names(form, traced), traced):
        given = known.node_of(leaf)
        placeholder = _placeholder(graph, name, given)
        inputs.append(placeholder.name)
        if given is not None:
            copies[given] = placeholder
    for node in known.sizes:
        size = _size_of(node, traced)
        if size is None:
            return None
        index, dimension = size
        argument = copies[known.node_of(traced[index])]
        copies[node] = graph.call_function(aten.sym_size.int, (argument, dimension))
        copies[node].meta = dict(node.meta)
    if known.copy_into(graph, copies) is None:
        return None
    graph.eliminate_dead_code(has_effect)
    aliases = Aliases(graph)
    if any(node.op == "placeholder" and aliases.is_written(node) for node in graph.nodes):
        return None
    try:
        guard = guard_from_placeholders(traced, dimensions)
    except ValueError:
        return None
    if guard.free.keys() != dimensions.keys() or guard.refusal(leaves) is not None or _is_limited(guard):
        return None
    example = described(form.keywords(leaves))
    reads = known.reads | implied(known.reads, known.module)
    return Region(graph, nn.Module(), form, guard, inputs, slots, {}, known.spec, example, reads)


def _is_limited(guard: Guard) -> bool:
    """Whether the free sizes have other conditions than that they are at least 2."""
    return any(bounds != (2, None) for bounds in guard.ranges.values()) or any(
        constraint != sympy.true for constraint in guard.constraints
    )


def _is_alike(traced: Any, value: Any) -> bool:
    if not isinstance(traced, Tensor):
        return type(traced) is type(value) and traced == value
    return isinstance(value, Tensor) and traced.dtype is value.dtype and traced.dim() == value.dim()


def _names(form: CallForm, leaves: list[Any]) -> Iterator[str]:
    for name, value in form.keywords(leaves).items():
        count = len(pytree.tree_leaves(value))
        yield from [name] if count == 1 else (f"{name}_{index}" for index in range(count))


def _placeholder(graph: fx.Graph, name: str, node: fx.Node | None) -> fx.Node:
    placeholder = graph.placeholder(name)
    if node is not None:
        placeholder.meta["val"] = node.meta["val"]
    return placeholder


def _size_of(node: fx.Node, leaves: list[Any]) -> tuple[int, int] | None:
    """(index, dimension) of the tensor among ``leaves`` that shows the size ``node``."""
    wanted = node.meta["val"]
    if not isinstance(wanted, torch.SymInt):
        return None
    for index, leaf in enumerate(leaves):
        for dimension, size in enumerate(leaf.shape if isinstance(leaf, Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr == wanted.node.expr:
                return index, dimension
    return None
