"""Converts a Python function to the tree of a pattern: traces and canonicalizes it like the graphs of models."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from ..canonical import canonicalise
from ..capture import trace
from ..graph import AnyNumber, Number, Op, Together, Tree, Var, arguments, written_arguments
from ..inputs import ExampleCall
from ..region import CaptureError, Dimensions, Region
from .errors import PatternError

MOST_CALLS = 100
# Capture names of values other than arguments, which no argument can have.
OUTPUT, _VALUE, _UNKNOWN = ".output{}", ".value{}", ".unknown{}"


@dataclass(frozen=True)
class Traced:
    """The trace of a function.

    Attributes:
        tree: its calls. Tensor arguments are captured under their names, and results as ``OUTPUT``.
        outputs: number of results.
        text: equal for equal trees.
        calls: nodes of its calls, by capture name.
        unknown: nodes of captured values that are computed from sizes, by capture name.
        region: its graph and guard.
    """

    tree: Op | Together
    outputs: int
    text: str
    calls: dict[str, fx.Node]
    unknown: dict[str, fx.Node]
    region: Region


def traced(
    function: Callable[..., Any],
    call: ExampleCall,
    free: Mapping[str, Dimensions],
    numbers: Mapping[float, str] | None = None,
    any_device: bool = False,
) -> Traced:
    """Traces ``function`` for ``call``.

    Args:
        free: the sizes that may vary, see ``capture.trace``.
        numbers: values of number arguments that match any number, with the names of these arguments.
        any_device: whether device arguments of calls match any device.

    Raises:
        PatternError: the function cannot be traced or be a pattern: it computes nothing, depends on values, draws
            random numbers, writes in place, or reads tensors that are not arguments.
    """
    module = nn.Module()
    module.forward = _without_defaults_of_use(function)
    try:
        region = trace(module, call, free)
        canonicalise(region.graph)
    except CaptureError as error:
        if isinstance(error.__cause__, GuardOnDataDependentSymNode):
            raise PatternError("its computation depends on values of its arguments, unlike a pattern") from error
        raise PatternError(f"it cannot be traced: {error}") from error
    names = dict(zip(region.inputs, region.call.names))
    return _Builder(region, names, numbers or {}, any_device).traced()


def _without_defaults_of_use(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with defaults that equal no example, because the call form drops arguments that equal a default."""
    signature = inspect.signature(function)

    def called(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    nothing = inspect.Parameter.empty
    parameters = [p if p.default is nothing else p.replace(default=object()) for p in signature.parameters.values()]
    called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return called


class _Builder:
    def __init__(self, region: Region, names: dict[str, str], numbers: Mapping[float, str], any_device: bool):
        self._region, self._names, self._numbers, self._any_device = region, names, numbers, any_device
        self._trees: dict[fx.Node, Tree] = {}
        self._lines: list[str] = []
        self._calls: dict[str, fx.Node] = {}
        self._unknown: dict[str, fx.Node] = {}

    def traced(self) -> Traced:
        results = self._results()
        for node in self._region.graph.nodes:
            if node.op == "call_function" and not _is_size(node):
                self._trees[node] = self._call(node, results)
            elif node.op == "placeholder" and node.users and node.name not in self._names:
                raise PatternError("it reads a tensor that is not an argument: make it an argument")
            elif node.op == "get_attr":
                raise PatternError("it has control flow that runs on the device, unlike a pattern")
        trees = [self._trees[node] for node in results]
        tree = trees[0] if len(trees) == 1 else Together(*trees)
        text = "\n".join([*self._lines, f"return {', '.join(str(each.name) for each in trees)}"])
        return Traced(tree, len(trees), text, self._calls, self._unknown, self._region)

    def _results(self) -> list[fx.Node]:
        if self._region.outputs.holds_caches or self._region.is_random or self._region.has_effects:
            raise PatternError("it draws random numbers or has other side effects")
        made = self._region.outputs.put_together(range(self._region.outputs.count))
        if not all(isinstance(each, int) for each in (made if isinstance(made, (tuple, list)) else [made])):
            raise PatternError("it must return a tensor or a tuple of tensors")
        (results,) = self._region.graph.output_node().args
        for node in results:
            if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
                raise PatternError("it returns values that are not tensors")
            if node.op != "call_function":
                raise PatternError("it returns an argument unchanged, which is not a result")
            if not node.meta["val"].is_floating_point():
                raise PatternError(f"it returns {node.meta['val'].dtype}: results must have a floating-point dtype")
        if not results or len(set(results)) < len(results):
            raise PatternError("it returns nothing, or one tensor twice")
        calls = [node for node in self._region.graph.nodes if node.op == "call_function"]
        if len(calls) > MOST_CALLS:
            raise PatternError(f"it makes {len(calls)} calls of operators, a pattern may have at most {MOST_CALLS}")
        return list(results)

    def _call(self, node: fx.Node, results: list[fx.Node]) -> Op:
        if node.target is not operator.getitem and not isinstance(node.target, torch._ops.OpOverload):
            raise PatternError(f"it calls {node.target}, which is not an operator")
        if written_arguments(node):
            raise PatternError(f"it writes in place: {node.target}")
        given = [self._argument(value) for value in _without_defaults(node)]
        number = len(self._lines)
        name = OUTPUT.format(results.index(node)) if node in results else _VALUE.format(number)
        self._lines.append(f"{name} = {node.target}({', '.join(map(_text, given))})")
        self._calls[name] = node
        return Op(node.target, *given, name=name)

    def _argument(self, value: Any) -> Tree:
        if isinstance(value, fx.Node):
            if _is_size(value):
                return self._stand_in(value)
            return self._trees[value] if value in self._trees else Var(self._names[value.name])
        if isinstance(value, (list, tuple)):
            return [self._argument(each) for each in value]
        if isinstance(value, torch.device) and self._any_device:
            return Var(_UNKNOWN.format(f"_device{len(self._lines)}"))
        if isinstance(value, float):
            return AnyNumber(self._numbers[value]) if value in self._numbers else Number(value)
        return value

    def _stand_in(self, value: fx.Node) -> Var:
        for name, node in self._unknown.items():
            if node is value:
                return Var(name)
        name = _UNKNOWN.format(len(self._unknown))
        self._unknown[name] = value
        return Var(name)


def _is_size(node: fx.Node) -> bool:
    """Whether a value is a number that is computed from free sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _without_defaults(node: fx.Node) -> list[Any]:
    """The arguments of a call without trailing ones that equal the operator's defaults."""
    given = list(arguments(node))
    if node.target is operator.getitem:
        return given
    schema = node.target._schema.arguments
    while given and schema[len(given) - 1].has_default_value() and _is_default(given[-1], schema[len(given) - 1]):
        given.pop()
    return given


def _is_default(value: Any, argument: Any) -> bool:
    return type(value) is type(argument.default_value) and value == argument.default_value


def _text(tree: Tree) -> str:
    if isinstance(tree, Op):
        return str(tree.name)
    return f"[{', '.join(map(_text, tree))}]" if isinstance(tree, list) else repr(tree)


def expression(value: Any) -> sympy.Basic | None:
    """Returns a number, or a graph value that is a number, as an expression of sizes; None for other values."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    return sympy.sympify(value) if isinstance(value, (bool, int, float)) else None
