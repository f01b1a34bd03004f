"""Writes the casts of autocast into a graph that was traced under it: its program then runs without autocast."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.amp.autocast_mode import autocast
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..graph import Aliases, aten, location
from ..region import CaptureError, Region
from ..torch_state import autocast_dtype, uncached_autocast, without_autocast

_VIEWS = (aten.t.default, aten.transpose.int, aten.permute.default)
_NESTED = torch.ops.higher_order.wrap_with_autocast


def write_casts(region: Region) -> None:
    """Adds to the graph of ``region`` a call for each cast that autocast made in its trace, with autocast still on.

    A cast of a weight becomes another placeholder, see ``Region.casted``.

    Raises:
        CaptureError: autocast changes a call in another way than by casts of its arguments.
    """
    if region.inner:
        raise CaptureError("it has distributed or quantized weights, which are not converted under autocast")
    with torch.no_grad(), uncached_autocast():
        made = _WithCasts(region)
        made.copy(region.graph, {})
    made.graph.lint()
    region.graph = made.graph


class _Casts(TorchDispatchMode):
    """Mode that collects the conversions of tensors to another dtype, as pairs (tensor, dtype)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default and isinstance(kwargs.get("dtype"), torch.dtype):
            self.found.append((args[0], kwargs["dtype"]))
        return func(*args, **kwargs)


class _WithCasts:
    """Builds ``graph``, that of ``region`` with casts."""

    def __init__(self, region: Region):
        self.graph, self._region = fx.Graph(), region
        self._aliases = Aliases(region.graph)
        self._originals: dict[fx.Node, fx.Node] = {}
        self._known: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def copy(self, graph: fx.Graph, values: dict[fx.Node, Any]) -> Any:
        """Copies the nodes of ``graph``, or of a subgraph whose placeholders have these ``values``. Returns the values
        of its output."""
        for node in graph.nodes:
            if node.op == "output":
                outputs = map_arg(node.args[0], values.__getitem__)
                if graph is self._region.graph:
                    self.graph.output(outputs).meta = dict(node.meta)
                return outputs
            if node in values or (node.op == "get_attr" and all(user.target is _NESTED for user in node.users)):
                continue
            values[node] = self._copied(node, values)
            if isinstance(values[node], fx.Node):
                self._originals.setdefault(values[node], node)
        raise AssertionError("a graph has an output")

    def _copied(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        target: Any = node.target
        if target is _NESTED:
            device_type, dtype, enabled, _, subgraph, *given = node.args
            inner = getattr(subgraph.graph.owning_module, subgraph.target).graph
            arguments = map_arg(given, values.__getitem__)
            with autocast(device_type, dtype, enabled, cache_enabled=False):
                return self.copy(inner, dict(zip(inner.find_nodes(op="placeholder"), arguments)))
        if target is operator.getitem and isinstance(outputs := values[node.args[0]], (tuple, list)):
            return outputs[node.args[1]]  # of a subgraph
        copied = self.graph.node_copy(node, values.__getitem__)
        if node.op == "placeholder":
            copied.name = node.name  # fx would rename one with the name of a Python builtin
        if isinstance(target, torch._ops.OpOverload) and self._dtype is not None:
            self._cast_arguments(copied, node)
        return copied

    @property
    def _dtype(self) -> torch.dtype | None:
        """The dtype of autocast, None where it is off."""
        return autocast_dtype(self._region.autocast[0])

    def _cast_arguments(self, node: fx.Node, traced: fx.Node) -> None:
        """Casts the arguments of ``node`` as autocast does."""
        tensors = [each for each in node.all_input_nodes if _is_cast_by_autocast(each)]
        if not tensors:
            return
        known = {id(each.meta["val"]): each for each in tensors}
        with _fake_mode(tensors[0]), _Casts() as casts:
            _run(node)
        dtypes = {known[id(value)]: dtype for value, dtype in casts.found if id(value) in known}
        expected = _dtypes(node.meta["val"])
        # The others are for operators that compute in another dtype without a cast, or that cast views.
        choices = [dtypes, dict.fromkeys(tensors, self._dtype), dict.fromkeys(tensors, torch.float32)]
        if any(id(value) not in known for value, _ in casts.found):
            choices = [*choices[1:], dtypes]
        for choice in choices:
            changed = {each: dtype for each, dtype in choice.items() if dtype is not each.meta["val"].dtype}
            if self._gives(node, changed) == expected:
                break
        else:
            raise CaptureError(f"autocast changes {node.target} by more than casts", location(traced))
        with self.graph.inserting_before(node):
            casted = {each: self._cast(each, dtype) for each, dtype in changed.items()}
        node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda each: casted.get(each, each))

    def _gives(self, node: fx.Node, changed: dict[fx.Node, torch.dtype]) -> list[Any] | None:
        """Returns the dtypes of the results of ``node`` without autocast, for arguments of ``changed`` dtypes; None if
        it does not accept these."""
        try:
            with _fake_mode(node.all_input_nodes[0]), without_autocast():
                return _dtypes(_run(node, changed))
        except Exception:  # operators raise anything for dtypes that they do not support
            return None

    def _cast(self, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Returns ``value`` as ``dtype``: one node for all its users, unless it is written in place."""
        known = self._known.get((value, dtype))
        if known is not None:
            return known
        slots = self._region.slots
        if value.op == "placeholder" and value.name in slots:
            with self.graph.inserting_before(next(iter(self.graph.nodes))):  # before the user inputs
                made = self.graph.placeholder(f"{value.name}_{str(dtype).removeprefix('torch.')}")
            slots[made.name], self._region.casted[made.name] = slots[value.name], dtype
        elif value.target in _VIEWS and _is_of_weight(value, slots):
            base = self._cast(value.args[0], dtype)
            made = self.graph.call_function(value.target, (base, *value.args[1:]), dict(value.kwargs))
        else:
            made = self.graph.call_function(aten.to.dtype, (value, dtype))
        made.meta = {name: each for name, each in value.meta.items() if name != "val"}
        with _fake_mode(value), without_autocast():
            made.meta["val"] = value.meta["val"].to(dtype)
        # A value that is written in place, or that may be within a subgraph, is cast again for each user.
        original = self._originals.get(value)
        is_outer = original is not None and original.graph is self._region.graph
        if is_outer and not self._aliases.is_written(original):
            self._known[value, dtype] = made
        return made


def _is_cast_by_autocast(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point() and value.dtype is not torch.float64


def _is_of_weight(node: fx.Node, weights: Mapping[str, Any]) -> bool:
    """Whether ``node`` is a weight, or a view of one with all its elements."""
    if node.op == "placeholder":
        return node.name in weights
    base = node.args[0] if node.target in _VIEWS else None
    return isinstance(base, fx.Node) and _is_of_weight(base, weights)


def _run(node: fx.Node, changed: Mapping[fx.Node, torch.dtype] = {}) -> Any:  # noqa: B006
    """Returns the results of a call on the traced values of its arguments, some of them with ``changed`` dtypes."""

    def value(each: fx.Node) -> Any:
        found = each.meta["val"]
        return found.to(changed[each]) if each in changed else found

    target: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), value)
    with enable_python_dispatcher():  # the C++ code of composite operators rejects symbolic sizes
        return target(*args, **kwargs)


def _dtypes(results: Any) -> list[Any]:
    return [each.dtype if isinstance(each, Tensor) else None for each in pytree.tree_leaves(results)]


def _fake_mode(node: fx.Node) -> Any:
    return node.meta["val"].fake_mode
