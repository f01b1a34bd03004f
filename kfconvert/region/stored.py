"""Stores a region as JSON values and rebuilds it, to avoid tracing it again.

The values may be untrusted. Operators must be in a list, and names must be identifiers, because they become part of
generated code. Sizes are expressions of a few classes, and classes are only looked up among the model's.
``runtime.state.evidence`` checks whether the graph belongs to the model.
"""

from __future__ import annotations

import json
import keyword
import logging
import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from ..graph import (
    is_laid_out,
    location,
    mark_laid_out,
    mark_location,
    mark_storage,
    module_path,
    storage_of,
)
from ..inputs import CallForm, ClassName, class_name
from .expressions import Unstorable, made_expression, stored_expression, symbol
from .operators import operator_name, operator_named
from .region import Read, Region
from .stored_guard import made_guard, stored_guard
from .stored_outputs import CONTAINERS, made_outputs, stored_outputs
from .stored_values import made_constant, made_device, stored_constant, stored_device

_LOG = logging.getLogger(__name__)

_FEW = 64  # maximum number of elements of a stored constant


def stored_region(region: Region) -> dict[str, Any]:
    """Returns ``region``, whose graph is not yet released, as JSON values without its example. Raises Unstorable."""
    if region.shards:
        raise Unstorable("it reads shards of distributed parameters")
    writer = _Writer(region)
    return {
        "sizes": writer.sizes,
        "values": writer.values,
        "nodes": writer.nodes,
        "inputs": region.inputs,
        "slots": {name: list(slot) for name, slot in region.slots.items()},
        "constants": {name: _stored_constant(writer.placeholder(name), t) for name, t in region.constants.items()},
        "reads": [read if isinstance(read, str) else [*class_name(read[0]), read[1]] for read in _sorted_reads(region)],
        "lost_gradients": sorted(region.lost_gradients),
        "guard": stored_guard(region.guard),
        "default_device": None if region.default_device is None else stored_device(region.default_device),
        **stored_outputs(region.outputs),
    }


def keep(region: Region) -> None:
    """Sets ``region.stored`` to the result of ``stored_region``, if it can be stored, before its graph is released."""
    if region.stored is None and len(region.graph.nodes) > 1:  # an empty graph has a root
        try:
            region.stored = _packed(stored_region(region))
        except Exception as reason:  # storing only makes loading faster, so errors must not stop a conversion
            _LOG.debug("a graph is not stored: %s: %s", type(reason).__name__, reason)


def kept(region: Region) -> dict[str, Any] | None:
    """Returns the result of ``keep``."""
    return None if region.stored is None else json.loads(zlib.decompress(region.stored))


def _packed(stored: dict[str, Any]) -> bytes:
    """Compresses the values, which are repetitive and live as long as the model."""
    return zlib.compress(json.dumps(stored, allow_nan=False).encode(), 1)


def _sorted_reads(region: Region) -> list[Read]:
    return sorted(region.reads, key=lambda read: (read,) if isinstance(read, str) else (*class_name(read[0]), read[1]))


class _Writer:
    """Converts the nodes of a region's graph to JSON values; ``values`` has the distinct metadata of their results."""

    def __init__(self, region: Region):
        self.values: list[Any] = []
        self.nodes: list[dict[str, Any]] = []
        self.sizes = _stored_sizes(region)
        self._known: dict[str, int] = {}
        self._storages: dict[int, int] = {}
        self._numbers: dict[fx.Node, int] = {}
        self._graph = region.graph
        for node in region.graph.nodes:
            self.nodes.append(self._node(node))
            self._numbers[node] = len(self._numbers)

    def placeholder(self, name: str) -> fx.Node:
        return next(node for node in self._graph.nodes if node.op == "placeholder" and node.name == name)

    def _node(self, node: fx.Node) -> dict[str, Any]:
        stored: dict[str, Any] = {"name": node.name, "value": self._number_of(self._value(node.meta.get("val")))}
        if node.op == "call_function":
            stored["calls"] = operator_name(node.target)
        elif node.op == "output":
            stored["returns"] = self._argument(node.args[0])
            return stored
        elif node.op != "placeholder" or node.args or node.kwargs:
            raise Unstorable(f"it has a node of the kind {node.op}")
        if node.args:
            stored["args"] = [self._argument(each) for each in node.args]
        if node.kwargs:
            stored["kwargs"] = {name: self._argument(each) for name, each in node.kwargs.items()}
        storage = storage_of(node)
        if storage is not None:
            stored["storage"] = self._storages.setdefault(storage, len(self._storages))
        if node.meta.get("nn_module_stack"):
            stored["module"] = module_path(node)
        if (place := location(node)) is not None:
            stored["location"] = place
        if "kfconvert_order" in node.meta:
            stored["order"] = list(node.meta["kfconvert_order"])
        if is_laid_out(node):
            stored["laid_out"] = True
        return stored

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": self._numbers[value]}
        if isinstance(value, (tuple, list)):  # fx has subclasses of these
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [self._argument(each) for each in value]}
        return stored_constant(value)

    def _number_of(self, value: Any) -> int:
        number = self._known.setdefault(repr(value), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided:
                raise Unstorable(f"it computes with the layout {value.layout}")
            return {
                "dtype": str(value.dtype).removeprefix("torch."),
                "device": stored_device(value.device),
                "shape": [_stored_size(size) for size in value.shape],
                "strides": [_stored_size(size) for size in value.stride()],
            }
        if isinstance(value, torch.SymInt):
            return {"size": _stored_size(value)}
        if isinstance(value, (tuple, list)):
            return {"tuple" if isinstance(value, tuple) else "list": [self._value(each) for each in value]}
        return {"constant": stored_constant(value)}


def _stored_size(size: Any) -> Any:
    return stored_expression(size.node.expr if isinstance(size, torch.SymInt) else size)


def _stored_sizes(region: Region) -> dict[str, Any]:
    """The free sizes with their traced values and bounds."""
    found: dict[str, Any] = {}
    for node in region.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if node.op == "placeholder" and isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                lower, upper = region.guard.ranges[size.node.expr]
                found[str(size.node.expr)] = {"hint": int(size.node.hint), "lower": lower, "upper": upper}
    return found


def _stored_constant(node: fx.Node, tensor: Tensor) -> dict[str, Any]:
    """A number or list that the forward converts to a tensor in each call. Other tensors, which may be written, are not
    stored."""
    literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
    if not literal or tensor.numel() > _FEW or tensor.is_complex():
        raise Unstorable("it reads a tensor that is not in any of its modules")
    return {
        "device": stored_device(tensor.device),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "elements": [stored_constant(each) for each in tensor.flatten().tolist()],
    }


def _made_tensor(stored: dict[str, Any]) -> Tensor:
    dtype, shape = made_constant({"dtype": stored["dtype"]}), stored["shape"]
    if math.prod(shape) != len(stored["elements"]) or len(shape) > _FEW or len(stored["elements"]) > _FEW:
        raise Unstorable("the number of elements of a constant does not match its shape")
    elements, device = [made_constant(each) for each in stored["elements"]], made_device(stored.get("device", "cpu"))
    if not all(type(each) in (bool, int, float) for each in elements):
        raise Unstorable("a constant is not a tensor of numbers")
    try:
        return torch.tensor(elements, dtype=dtype, device=device).reshape(shape)
    except (RuntimeError, AssertionError, OverflowError, TypeError) as error:  # also for a missing device
        raise Unstorable("a constant is not a tensor of numbers") from error


def made_reads(stored: dict[str, Any], classes: Mapping[ClassName, type]) -> frozenset[Read]:
    """Returns the reads of a stored region, see ``Region.reads``. See ``made_region`` for parameters and errors."""
    reads = set[Read]()
    for read in stored["reads"]:
        if isinstance(read, str):
            reads.add(read)
        elif (read[0], read[1]) in classes:
            reads.add((classes[read[0], read[1]], read[2]))
        else:
            raise Unstorable(f"the model has no {str(read[1])[:100]}")
    return frozenset(reads)


def made_region(stored: dict[str, Any], call: CallForm, example: Any, classes: Mapping[ClassName, type]) -> Region:
    """Rebuilds the region from the result of ``stored_region``, for ``call`` with the inputs described by ``example``.

    Args:
        stored: values in the form of ``artifact.schema.StoredRegion``.
        classes: classes of the model's modules and configurations, by name.

    Raises:
        Unstorable: the values are invalid, or belong to another model.
    """
    constants = {name: _made_tensor(each) for name, each in stored["constants"].items()}
    reader = _Reader(stored)
    placeholders = {node.name: node for node in reader.graph.nodes if node.op == "placeholder"}
    slots = {name: (path, attribute) for name, (path, attribute) in stored["slots"].items()}
    if sorted([*slots, *constants, *stored["inputs"]]) != sorted(placeholders):
        raise Unstorable("the inputs of its graph do not match its description")
    for name, constant in constants.items():
        if constant.numel() == 1:
            placeholders[name].meta["kfconvert_value"] = constant.item()  # see constant_value
    device = None if stored["default_device"] is None else made_device(stored["default_device"])
    outputs, returned = made_outputs(stored, call), reader.graph.output_node().args[0]
    if not isinstance(returned, tuple) or outputs.count != len(returned):
        raise Unstorable("the number of outputs of its graph does not match its description")
    guard = made_guard(stored["guard"])
    inputs = range(len(stored["inputs"]))
    if sorted([each.index for each in guard.tensors] + [index for index, _ in guard.constants]) != list(inputs):
        raise Unstorable("its guard does not match its arguments")
    lost = stored.get("lost_gradients")
    if lost is None or not placeholders.keys() >= set(lost):
        raise Unstorable("it does not state which gradients its graph has")
    region = Region(reader.graph, nn.Module(), call, guard, stored["inputs"], slots, constants, outputs, example)
    region.reads, region.default_device, region.stored = made_reads(stored, classes), device, _packed(stored)
    region.lost_gradients = frozenset(lost)
    return region


class _Reader:
    """Rebuilds the graph from the nodes of a ``_Writer``."""

    def __init__(self, stored: dict[str, Any]):
        self.graph = fx.Graph()
        self._hints: dict[Any, int] = {}
        self._environment = ShapeEnv()
        for name, size in stored["sizes"].items():
            free, upper = symbol(name), int_oo if size["upper"] is None else size["upper"]
            if not size["lower"] <= size["hint"] <= upper:
                raise Unstorable("a size is not within its bounds")
            self._hints[free] = size["hint"]
            self._environment.add_backed_var_to_val(free, size["hint"])
            # Not through the environment, which would search for the place in user code, and import the exporter for
            # that.
            self._environment.var_to_range[free] = ValueRanges(size["lower"], upper)
        self._mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        with self._mode:
            self._values = [self._value(each) for each in stored["values"]]
        self._nodes: list[fx.Node] = []
        for each in stored["nodes"]:
            self._nodes.append(self._node(each))
        if [number for number, node in enumerate(self._nodes, 1) if node.op == "output"] != [len(self._nodes)]:
            raise Unstorable("its graph does not end with its output")
        self.graph.lint()

    def _node(self, stored: dict[str, Any]) -> fx.Node:
        name = stored["name"]
        if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
            raise Unstorable(f"{name[:50]!r} is not a name of a value")
        if "returns" in stored:
            node = self.graph.output(self._argument(stored["returns"]))
        elif "calls" in stored:
            target = operator_named(stored["calls"])
            args = tuple(self._argument(each) for each in stored.get("args", ()))
            kwargs = {key: self._argument(each) for key, each in stored.get("kwargs", {}).items()}
            _check_arguments(target, args, kwargs)
            node = self.graph.call_function(target, args, kwargs)
        else:
            node = self.graph.placeholder(name)
        node.name = name  # fx would rename a node with the name of a Python builtin
        try:
            value = self._values[stored["value"]]
        except IndexError:
            raise Unstorable("a node has a value that does not exist") from None
        if node.op != "output":
            node.meta["val"] = value
        if "module" in stored:
            node.meta["nn_module_stack"] = {stored["module"]: (stored["module"], "")}
        if "location" in stored:
            mark_location(node, stored["location"])
        if "storage" in stored:
            mark_storage(node, stored["storage"])
        if "order" in stored:
            node.meta["kfconvert_order"] = stored["order"]
        if stored.get("laid_out"):
            mark_laid_out(node)
        return node

    def _argument(self, stored: Any) -> Any:
        if isinstance(stored, dict) and len(stored) == 1:
            ((kind, value),) = stored.items()
            if kind in CONTAINERS and isinstance(value, list):
                return CONTAINERS[kind](self._argument(each) for each in value)
            if kind == "node":
                if type(value) is not int or not 0 <= value < len(self._nodes):
                    raise Unstorable("a node reads a value before its definition")
                return self._nodes[value]
        return made_constant(stored)

    def _value(self, stored: dict[str, Any]) -> Any:
        if "shape" in stored:
            shape, strides = ([self._size(each) for each in stored[key]] for key in ("shape", "strides"))
            dtype, device = made_constant({"dtype": stored["dtype"]}), made_device(stored["device"])
            if len(shape) != len(strides):
                raise Unstorable("the number of strides of a value does not match its dimensions")
            try:
                return torch.empty_strided(shape, strides, dtype=dtype, device=device)
            except RuntimeError as error:  # for negative sizes and missing devices
                raise Unstorable(f"a value is not a tensor: {str(error).partition(chr(10))[0][:100]}") from error
        if "size" in stored:
            return self._size(stored["size"])
        for name, kind in CONTAINERS.items():
            if isinstance(stored.get(name), list):
                return kind(self._value(each) for each in stored[name])
        return made_constant(stored.get("constant"))

    def _size(self, stored: Any) -> Any:
        expression = made_expression(stored)
        if isinstance(expression, int):
            return expression
        try:
            hint = int(expression.subs(self._hints))
        except TypeError:
            raise Unstorable("a size is computed from sizes that do not exist") from None
        return self._environment.create_symintnode(expression, hint=hint)


def _check_arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises Unstorable unless the arguments match ``target``, because names of arguments become code."""
    if isinstance(target, torch._ops.OpOverload):
        known = [argument.name for argument in target._schema.arguments]
        if len(args) <= len(known) and set(kwargs) <= set(known[len(args) :]):
            return
    elif not kwargs and all(isinstance(each, (fx.Node, int, float)) for each in args) and len(args) in (1, 2):
        return
    raise Unstorable(f"{str(target)[:100]} takes other arguments than these")
