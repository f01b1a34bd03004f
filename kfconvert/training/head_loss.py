"""Pass: a linear head whose logits only go into a cross entropy becomes one operator, which stores no logits.

It works on a graph of Dynamo, before autograd. In that graph, only the dtypes of values show the casts of autocast.
"""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensor

from .linear_cross_entropy import OPERATOR

# Logits of fewer bytes stay: TorchInductor fuses their loss with its neighbours.
SMALLEST_LOGITS = 2**24

_CROSS_ENTROPY = inspect.signature(F.cross_entropy)
_RESHAPES = ("view", "reshape", "flatten")
_OF_ROWS = ("float", "double", "to", "contiguous", *_RESHAPES)


def fuse_heads(graph: fx.Graph) -> int:
    """Replaces each linear head and its cross entropy by one operator; returns how many. The graph is valid after an
    error, too."""
    count = 0
    for call in graph.find_nodes(op="call_function", target=F.cross_entropy):
        options = _CROSS_ENTROPY.bind(*call.args, **call.kwargs)
        options.apply_defaults()
        if (chain := _chain(options.arguments["input"])) and _is_fusable(call, chain[-1], options.arguments):
            _replace(graph, call, chain, options.arguments)
            count += 1
    return count


def _value(node: Any) -> Any:
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _tensors(head: fx.Node) -> tuple[Any, Any, Any]:
    """Input, weight and bias of a linear layer; the last may be None."""
    hidden, weight, bias = (*head.args, head.kwargs.get("bias"))[:3]
    return hidden, weight, bias


def _chain(node: Any) -> list[fx.Node]:
    """The calls from the logits ``node`` back to a linear layer, if they pass on whole rows in their order, and each
    has one user; else an empty list."""
    chain, selected, classes = [], False, _value(node).shape[-1]
    while isinstance(node, fx.Node) and len(node.users) == 1 and _value(node).shape[-1] == classes:
        chain.append(node)
        if node.target is F.linear:
            return chain
        if node.target is operator.getitem and _selects_rows(node.args[1], _value(node).dim()):
            selected = True  # from the shape of the head
        elif node.op != "call_method" or node.target not in _OF_ROWS or (selected and node.target in _RESHAPES):
            break
        node = node.args[0]
    return []


def _selects_rows(index: Any, dimensions: int) -> bool:
    """Whether ``index`` has slices of other dimensions than the last one."""
    if not isinstance(index, tuple) or not all(each is ... or isinstance(each, slice) for each in index):
        return False
    return index[-1] == slice(None) or (... not in index and len(index) < dimensions)


def _is_fusable(call: fx.Node, head: fx.Node, options: dict[str, Any]) -> bool:
    tensors = [each for each in _tensors(head) if each is not None]
    logits, target = _value(options["input"]), _value(options["target"])
    values = [*map(_value, tensors), logits, target]
    return (
        all(isinstance(each, FakeTensor) and each.device == logits.device for each in values)
        and _is_large(logits)
        and _value(head).requires_grad
        and _value(call).requires_grad
        and (logits.dim(), target.dim(), target.dtype) == (2, 1, torch.int64)
        and options["weight"] is options["size_average"] is options["reduce"] is None
        and options["reduction"] in ("mean", "sum")
        and all(isinstance(options[name], (int, float)) for name in ("ignore_index", "label_smoothing"))
        # The operator reads the tensors later than the head: no call in between may write to them.
        and not any(head < user < call for tensor in tensors for user in tensor.users)
    )


def _is_large(logits: FakeTensor) -> bool:
    """Whether the logits are worth the operator. Those with a free size are: a comparison would fix it."""
    free = not all(isinstance(size, int) for size in logits.shape)
    return free or logits.numel() * logits.itemsize >= SMALLEST_LOGITS


def _replace(graph: fx.Graph, call: fx.Node, chain: list[fx.Node], options: dict[str, Any]) -> None:
    hidden, weight, bias = tensors = _tensors(chain[-1])
    wanted = [each is not None and _value(each).requires_grad for each in tensors]
    shape, mean, smoothing = (-1, _value(hidden).shape[-1]), options["reduction"] == "mean", options["label_smoothing"]
    with graph.inserting_before(call):
        for each in reversed(chain):
            if each.target is operator.getitem:
                hidden = graph.call_function(operator.getitem, (hidden, each.args[1]))
        hidden = graph.call_method("to", (graph.call_method("reshape", (hidden, *shape)), _value(chain[-1]).dtype))
        arguments = hidden, weight, bias, options["target"], options["ignore_index"], mean, smoothing, wanted
        loss = graph.call_function(operator.getitem, (graph.call_function(OPERATOR, arguments), 0))
        call.replace_all_uses_with(graph.call_method("to", (loss, _value(call).dtype)))
    for node in (call, *chain):
        graph.erase_node(node)
