"""Stores a region as JSON values and rebuilds it, so that a load needs no trace.

``torch.export.load`` takes 1.8 s for the graph of a BERT-base, and evaluates text; this takes 0.2 s and evaluates
nothing. The values may be untrusted: operators and classes must be in a list, and names must be identifiers, because
they become part of generated code. ``runtime.state.evidence`` checks whether the graph belongs to the model.
"""

from __future__ import annotations

import json
import keyword
import logging
import zlib
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from ..graph import location, mark_location, mark_storage, module_path, storage_of
from ..inputs import CallForm, ClassName, Reader, TreeForm, Unstorable, Writer
from .expressions import made_expression, stored_expression
from .guard import Guard, TensorGuard
from .operators import operator_name, operator_named
from .region import Region

_LOG = logging.getLogger(__name__)
_RECORDS = (*Writer.records, Guard, TensorGuard, TreeForm)
_FIELDS = ("inputs", "slots", "inner", "constants", "outputs", "reads", "default_device", "guard")
# Annotations of nodes, see ``graph``, that need no conversion.
_MARKS = ("kfconvert_order", "kfconvert_laid_out", "kfconvert_value")
_FEW = 64  # maximum number of elements of a stored constant


def store_graph(region: Region) -> None:
    """Sets ``region.stored``, if the region can be stored, before its graph is released."""
    if region.stored is None and len(region.graph.nodes) > 1:  # an empty graph has a root
        try:
            stored = _GraphWriter(region).graph()
            region.stored = zlib.compress(json.dumps(stored, allow_nan=False).encode(), 1)
        except Exception as reason:  # storing only makes loading faster, so errors must not stop a conversion
            _LOG.debug("a graph is not stored: %s: %s", type(reason).__name__, reason)


def stored_graph(region: Region) -> dict[str, Any] | None:
    """Returns ``region`` as JSON values without its example, see ``store_graph``; None if it cannot be stored."""
    return None if region.stored is None else json.loads(zlib.decompress(region.stored))


def made_region(stored: dict[str, Any], call: CallForm, example: Any, classes: Mapping[ClassName, type]) -> Region:
    """Rebuilds the region from the result of ``stored_graph``, for ``call`` with the inputs described by ``example``.

    Args:
        classes: classes of the model's modules and configurations, by name.

    Raises:
        Unstorable: the values are of another model, or not allowed. Any other error: the values are damaged.
    """
    reader = _GraphReader(stored, classes)
    found = dict(zip(_FIELDS, map(reader.made, stored["fields"]), strict=True))
    region = Region(reader.graph, nn.Module(), call, example=example, **found)
    held = [each.index for each in region.guard.tensors] + [index for index, _ in region.guard.constants]
    if sorted(held) != list(range(len(region.inputs))):
        raise Unstorable("its guard does not match its arguments")
    region.stored = zlib.compress(json.dumps(stored).encode(), 1)
    return region


class _GraphWriter(Writer):
    """Converts the nodes of a region's graph to JSON values; ``values`` has the distinct metadata of their results."""

    records = _RECORDS

    def __init__(self, region: Region):
        if region.shards:
            raise Unstorable("it reads shards of distributed parameters")
        if region.autocast is not None:
            raise Unstorable("it was traced under autocast")
        self._region = region
        self._values: dict[str, int] = {}
        self._storages: dict[int, int] = {}
        self._numbers = {node: number for number, node in enumerate(region.graph.nodes)}

    def graph(self) -> dict[str, Any]:
        """Returns the region as JSON values."""
        self._check_constants()
        nodes = [self._node(node) for node in self._region.graph.nodes]
        fields = [self.stored(getattr(self._region, name)) for name in _FIELDS]
        return {"sizes": self._sizes(), "values": [*map(json.loads, self._values)], "nodes": nodes, "fields": fields}

    def stored(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": self._numbers[value]}
        if isinstance(value, torch.SymInt):
            return {"size": stored_expression(value.node.expr)}
        if isinstance(value, sympy.Basic):
            return {"expression": stored_expression(value)}
        if isinstance(value, Tensor) and value.layout is torch.strided:
            of = [value.dtype, value.device, list(value.shape)]
            if isinstance(value, torch._subclasses.FakeTensor):
                return {"fake": list(map(self.stored, (*of, list(value.stride()))))}
            return {"tensor": list(map(self.stored, (*of, value.flatten().tolist())))}
        if isinstance(value, pytree.TreeSpec):
            inner = None if value.is_leaf() else [value.type, value.context, value.children()]
            return {"tree": inner and list(map(self.stored, inner))}
        return super().stored(value)

    def _node(self, node: fx.Node) -> dict[str, Any]:
        value = json.dumps(self.stored(node.meta.get("val") if node.op != "output" else None), allow_nan=False)
        stored: dict[str, Any] = {"name": node.name, "value": self._values.setdefault(value, len(self._values))}
        if node.op == "call_function":
            stored["calls"] = operator_name(node.target)
        elif node.op not in ("placeholder", "output"):
            raise Unstorable(f"it has a node of the kind {node.op}")
        if node.args:
            stored["args"] = self.stored(node.args)
        if node.kwargs:
            stored["kwargs"] = self.stored(dict(node.kwargs))
        if node.op != "output" and (storage := storage_of(node)) is not None:
            stored["storage"] = self._storages.setdefault(storage, len(self._storages))
        if node.meta.get("nn_module_stack"):
            stored["module"] = module_path(node)
        if (place := location(node)) is not None:
            stored["location"] = place
        return stored | {name: self.stored(node.meta[name]) for name in _MARKS if name in node.meta}

    def _check_constants(self) -> None:
        """Raises Unstorable if a constant is not a number or list that the forward converts to a tensor in each call.
        Other tensors, which may be written, are not stored."""
        for node in self._region.graph.find_nodes(op="placeholder"):
            tensor = self._region.constants.get(node.name)
            literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
            if tensor is not None and (not literal or tensor.numel() > _FEW or tensor.is_complex()):
                raise Unstorable("it reads a tensor that is not in any of its modules")

    def _sizes(self) -> dict[str, list[int | None]]:
        """Returns the traced value and the bounds of each free size."""
        found: dict[str, list[int | None]] = {}
        for node in self._region.graph.find_nodes(op="placeholder"):
            value = node.meta.get("val")
            for size in value.shape if isinstance(value, Tensor) else ():
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    found[str(size.node.expr)] = [int(size.node.hint), *self._region.guard.ranges[size.node.expr]]
        return found


class _GraphReader(Reader):
    """Rebuilds the ``graph`` of a ``_GraphWriter``."""

    records = _RECORDS

    def __init__(self, stored: dict[str, Any], classes: Mapping[ClassName, type]):
        super().__init__(classes)
        self.graph = fx.Graph()
        self._nodes: list[fx.Node] = []
        self._hints: dict[Any, int] = {}
        self._environment = ShapeEnv()
        self._makers |= {
            "node": self._nodes.__getitem__,
            "size": self._size,
            "expression": made_expression,
            "fake": lambda given: torch.empty_strided(*map(self.made, given[2:]), **self._kind(given)),
            "tensor": lambda given: torch.tensor(self.made(given[3]), **self._kind(given)).reshape(self.made(given[2])),
            "tree": self._tree,
        }
        for name, (hint, lower, upper) in stored["sizes"].items():
            size = made_expression(name)
            self._hints[size] = hint
            self._environment.add_backed_var_to_val(size, hint)
            # Not through the environment, which would search for the place in user code, and import the exporter for
            # that.
            self._environment.var_to_range[size] = ValueRanges(lower, int_oo if upper is None else upper)
        with FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True):
            values = list(map(self.made, stored["values"]))
        for each in stored["nodes"]:
            self._nodes.append(self._node(each, values[each["value"]]))
        self.graph.lint()

    def _node(self, stored: dict[str, Any], value: Any) -> fx.Node:
        name, args = stored["name"], self.made(stored.get("args", {"tuple": []}))
        kwargs = self.made(stored.get("kwargs", {"dict": []}))
        for each in (name, *kwargs):
            if not each.isidentifier() or keyword.iskeyword(each) or not each.isascii():
                raise Unstorable(f"{each[:50]!r} is not a name of a value")
        if "calls" in stored:
            node = self.graph.call_function(operator_named(stored["calls"]), args, kwargs)
        else:
            node = self.graph.output(*args) if args else self.graph.placeholder(name)
        node.name = name  # fx would rename a node with the name of a Python builtin
        if node.op != "output":
            node.meta["val"] = value
        if "module" in stored:
            node.meta["nn_module_stack"] = {stored["module"]: (stored["module"], "")}
        if "location" in stored:
            mark_location(node, stored["location"])
        if "storage" in stored:
            mark_storage(node, stored["storage"])
        node.meta.update((name, self.made(stored[name])) for name in _MARKS if name in stored)
        return node

    def _kind(self, given: list[Any]) -> dict[str, Any]:
        return {"dtype": self.made(given[0]), "device": self.made(given[1])}

    def _size(self, stored: Any) -> Any:
        expression = made_expression(stored)
        if isinstance(expression, int):
            return expression
        return self._environment.create_symintnode(expression, hint=int(expression.subs(self._hints)))

    def _tree(self, stored: Any) -> pytree.TreeSpec:
        if stored is None:
            return pytree.tree_structure(0)
        kind, context, children = map(self.made, stored)
        return pytree.TreeSpec(kind, context, children)
