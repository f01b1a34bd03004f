"""Calls of ``contiguous()`` in a traced graph, which may copy for other inputs than the example."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from ..graph import LAYOUT_READERS, Aliases, aliased_arguments, aten, is_to_memory_format, is_weight, sizes_of

# Operators with contiguous results for any arguments.
_ALWAYS_CONTIGUOUS = {
    aten.addmm.default, aten.bmm.default, aten.embedding.default, aten.layer_norm.default, aten.linear.default,
    aten.matmul.default, aten.mm.default,
}  # fmt: skip
# Methods that return the tensor itself if no conversion is needed.
_CONVERSIONS = {Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.cpu, Tensor.cuda}


class KeptContiguous(TorchFunctionMode):
    """Mode that traces every call of ``Tensor.contiguous`` and every conversion to a memory format as an operator. If a
    tensor already has the format, PyTorch returns the tensor itself: the tracer records no call, or cannot distinguish
    its result from the tensor."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.contiguous and args[0].is_contiguous(**kwargs):
            # Called on an alias. On the tensor itself, the result would be the same object, and the tracer would use it
            # for every later use of the tensor.
            return aten.contiguous.default(aten.alias.default(args[0]), **kwargs)
        if func in _CONVERSIONS and kwargs.get("memory_format") not in (None, torch.preserve_format):
            return func(aten.alias.default(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)


def drop_kept_contiguous(graph: fx.Graph) -> None:
    """Removes the calls that ``KeptContiguous`` added if no output, write or stride-dependent operator needs them."""
    aliases, always = Aliases(graph), always_contiguous(graph)
    for node in list(graph.nodes):
        is_contiguous = node.target is aten.contiguous.default
        if not (is_contiguous or is_to_memory_format(node)) or node.args[0].target is not aten.alias.default:
            continue
        alias = node.args[0]
        tensor = alias.args[0]
        node.replace_input_with(alias, tensor)
        if is_contiguous and (tensor in always or not (aliases.is_written(node) or _shows(node))):
            node.replace_all_uses_with(tensor)
            graph.erase_node(node)
        if not alias.users:
            graph.erase_node(alias)


def always_contiguous(graph: fx.Graph) -> set[fx.Node]:
    """Returns the nodes that are contiguous for all inputs of the graph: weights, and values computed from them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_weight(node) or node.target in _ALWAYS_CONTIGUOUS:
            found.add(node)
        elif node.op == "call_function" and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            values = [value.meta.get("val") for value in (node, *node.all_input_nodes)]
            same_shape = len(set(map(sizes_of, values))) == 1
            if same_shape and found.issuperset(node.all_input_nodes):
                found.add(node)
    return found


def lies_in_output(node: fx.Node) -> bool:
    """Whether an output of the graph is ``node``, a view of it, or computed from it elementwise."""

    def keeps_layout(user: fx.Node) -> bool:
        return torch.Tag.pointwise in getattr(user.target, "tags", ()) or bool(aliased_arguments(user))

    return _reaches(node, lambda user: user.op == "output", keeps_layout)


def _shows(node: fx.Node) -> bool:
    """Whether the layout of ``node`` may affect an output or a stride-dependent operator."""
    return _reaches(
        node,
        lambda user: user.op == "output" or user.target in LAYOUT_READERS,
        lambda user: user.target not in _ALWAYS_CONTIGUOUS,
    )


def _reaches(node: fx.Node, goal: Callable[[fx.Node], bool], passes_on: Callable[[fx.Node], bool]) -> bool:
    """Whether a ``goal`` uses ``node``, or a value that users with ``passes_on`` derive from it."""
    seen, open_nodes = {node}, [node]
    while open_nodes:
        for user in open_nodes.pop().users:
            if goal(user):
                return True
            if user not in seen and passes_on(user):
                seen.add(user)
                open_nodes.append(user)
    return False
