"""A region as JSON values, and a region made again of them: what was traced once need not be traced again.

The values may come from an unknown hand. Operators are those of a list, names are names and nothing else (the code
of a program is made of them), sizes are expressions of a few kinds, and classes are only looked up among those that the
model has. Whether the graph is that of the model is for others to know, see ``runtime.state.evidence``.
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
    aten,
    is_laid_out,
    is_marked_view,
    location,
    mark_laid_out,
    mark_location,
    mark_storage,
    mark_view,
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

_FEW = 64  # elements of a number or a short list that a forward makes a tensor of


def stored_region(region: Region) -> dict[str, Any]:
    """``region``, whose graph is still there, as JSON values but for its example. Raises Unstorable."""
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
    """Note in ``region`` what ``stored_region`` tells of it, as long as its graph is there, if it can be stored."""
    if region.stored is None and len(region.graph.nodes) > 1:  # an empty graph has a root
        try:
            region.stored = _packed(stored_region(region))
        except Exception as reason:  # no conversion ends for what makes loading faster only
            _LOG.debug("a graph is not stored: %s: %s", type(reason).__name__, reason)


def kept(region: Region) -> dict[str, Any] | None:
    """What ``keep`` has noted."""
    return None if region.stored is None else json.loads(zlib.decompress(region.stored))


def _packed(stored: dict[str, Any]) -> bytes:
    """Most of it is repetition, and a model has it as long as it lives."""
    return zlib.compress(json.dumps(stored, allow_nan=False).encode(), 1)


def _sorted_reads(region: Region) -> list[Read]:
    return sorted(region.reads, key=lambda read: (read,) if isinstance(read, str) else (*class_name(read[0]), read[1]))


class _Writer:
    """The nodes of the graph of a region as JSON values; ``values`` has what is known of their results, each once."""

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
        if is_marked_view(node):
            stored["view"] = True
        if is_laid_out(node):
            stored["laid_out"] = True
        return stored

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return {"node": self._numbers[value]}
        if isinstance(value, (tuple, list)):  # fx has lists of its own, which are neither of these very classes
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
    """The free sizes: what each was in the trace, and between what it lies."""
    found: dict[str, Any] = {}
    for node in region.graph.nodes:
        value = node.meta.get("val")
        for size in value.shape if node.op == "placeholder" and isinstance(value, Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                lower, upper = region.guard.ranges[size.node.expr]
                found[str(size.node.expr)] = {"hint": int(size.node.hint), "lower": lower, "upper": upper}
    return found


def _stored_constant(node: fx.Node, tensor: Tensor) -> dict[str, Any]:
    """A number or list that the forward makes a tensor of in each call. Other tensors, which somebody may write to, are
    not stored."""
    literal = all(user.target is torch.ops.aten.lift_fresh_copy.default for user in node.users)
    if not literal or tensor.numel() > _FEW or tensor.is_complex():
        raise Unstorable("it reads a tensor that none of its modules has")
    return {
        "device": stored_device(tensor.device),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "elements": [stored_constant(each) for each in tensor.flatten().tolist()],
    }


def _made_tensor(stored: dict[str, Any]) -> Tensor:
    dtype, shape = made_constant({"dtype": stored["dtype"]}), stored["shape"]
    if math.prod(shape) != len(stored["elements"]) or len(shape) > _FEW or len(stored["elements"]) > _FEW:
        raise Unstorable("a constant has another number of elements than its shape")
    elements, device = [made_constant(each) for each in stored["elements"]], made_device(stored.get("device", "cpu"))
    if not all(type(each) in (bool, int, float) for each in elements):
        raise Unstorable("a constant is no tensor of numbers")
    try:
        return torch.tensor(elements, dtype=dtype, device=device).reshape(shape)
    except (RuntimeError, AssertionError, OverflowError, TypeError) as error:  # there may be no such device, too
        raise Unstorable("a constant is no tensor of numbers") from error


def made_reads(stored: dict[str, Any], classes: Mapping[ClassName, type]) -> frozenset[Read]:
    """What a stored region has read, as of ``Region.reads``; parameters and errors as of ``made_region``."""
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
    """The region that ``stored_region`` has told of, as called in ``call`` with what ``example`` describes.

    Args:
        stored: of the form that ``artifact.schema.StoredRegion`` has.
        classes: those of the model's modules and configurations, by their names.

    Raises:
        Unstorable: it is none, or of another model.
    """
    constants = {name: _made_tensor(each) for name, each in stored["constants"].items()}
    reader = _Reader(stored)
    placeholders = {node.name: node for node in reader.graph.nodes if node.op == "placeholder"}
    slots = {name: (path, attribute) for name, (path, attribute) in stored["slots"].items()}
    if sorted([*slots, *constants, *stored["inputs"]]) != sorted(placeholders):
        raise Unstorable("its graph takes other values than it tells of")
    for name, constant in constants.items():
        if constant.numel() == 1:
            placeholders[name].meta["kfconvert_value"] = constant.item()  # see constant_value
    device = None if stored["default_device"] is None else made_device(stored["default_device"])
    outputs, returned = made_outputs(stored, call), reader.graph.output_node().args[0]
    if not isinstance(returned, tuple) or outputs.count != len(returned):
        raise Unstorable("its graph returns another number of values than it tells of")
    guard = made_guard(stored["guard"])
    inputs = range(len(stored["inputs"]))
    if sorted([each.index for each in guard.tensors] + [index for index, _ in guard.constants]) != list(inputs):
        raise Unstorable("its guard is about other arguments than it takes")
    lost = stored.get("lost_gradients")
    if lost is None or not placeholders.keys() >= set(lost):
        raise Unstorable("it does not tell which gradients its graph has")
    region = Region(reader.graph, nn.Module(), call, guard, stored["inputs"], slots, constants, outputs, example)
    region.reads, region.default_device, region.stored = made_reads(stored, classes), device, _packed(stored)
    region.lost_gradients = frozenset(lost)
    return region


class _Reader:
    """The graph that the nodes of a ``_Writer`` tell of."""

    def __init__(self, stored: dict[str, Any]):
        self.graph = fx.Graph()
        self._hints: dict[Any, int] = {}
        self._environment = ShapeEnv()
        for name, size in stored["sizes"].items():
            free, upper = symbol(name), int_oo if size["upper"] is None else size["upper"]
            if not size["lower"] <= size["hint"] <= upper:
                raise Unstorable("a size is not between its bounds")
            self._hints[free] = size["hint"]
            self._environment.add_backed_var_to_val(free, size["hint"])
            # Who has the environment do that has it look for the place in the user's code, and so import the exporter
            # with all that it needs.
            self._environment.var_to_range[free] = ValueRanges(size["lower"], upper)
        self._mode = FakeTensorMode(shape_env=self._environment, allow_non_fake_inputs=True)
        with self._mode:
            self._values = [self._value(each) for each in stored["values"]]
        self._nodes: list[fx.Node] = []
        for each in stored["nodes"]:
            self._nodes.append(self._node(each))
        if [number for number, node in enumerate(self._nodes, 1) if node.op == "output"] != [len(self._nodes)]:
            raise Unstorable("its graph does not end with what it returns")
        self.graph.lint()

    def _node(self, stored: dict[str, Any]) -> fx.Node:
        name = stored["name"]
        if not name.isidentifier() or keyword.iskeyword(name) or not name.isascii():
            raise Unstorable(f"{name[:50]!r} is no name of a value")
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
        node.name = name  # fx would give another name to one that is called like a function of Python
        try:
            value = self._values[stored["value"]]
        except IndexError:
            raise Unstorable("a node has a value that is not there") from None
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
        if stored.get("view") and node.target is aten.reshape.default:
            mark_view(node)
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
                    raise Unstorable("a node reads a value that is not there yet")
                return self._nodes[value]
        return made_constant(stored)

    def _value(self, stored: dict[str, Any]) -> Any:
        if "shape" in stored:
            shape, strides = ([self._size(each) for each in stored[key]] for key in ("shape", "strides"))
            dtype, device = made_constant({"dtype": stored["dtype"]}), made_device(stored["device"])
            if len(shape) != len(strides):
                raise Unstorable("a value has another number of strides than of dimensions")
            try:
                return torch.empty_strided(shape, strides, dtype=dtype, device=device)
            except RuntimeError as error:  # of sizes below zero, and of devices that are not there
                raise Unstorable(f"a value is no tensor: {str(error).partition(chr(10))[0][:100]}") from error
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
            raise Unstorable("a size is computed of sizes that are not there") from None
        return self._environment.create_symintnode(expression, hint=hint)


def _check_arguments(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises Unstorable where no call of ``target`` looks like this. The names of arguments become code."""
    if isinstance(target, torch._ops.OpOverload):
        known = [argument.name for argument in target._schema.arguments]
        if len(args) <= len(known) and set(kwargs) <= set(known[len(args) :]):
            return
    elif not kwargs and all(isinstance(each, (fx.Node, int, float)) for each in args) and len(args) in (1, 2):
        return
    raise Unstorable(f"{str(target)[:100]} takes other arguments than these")
