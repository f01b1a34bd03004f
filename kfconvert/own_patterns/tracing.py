"""A plain Python function as the tree of a pattern: traced and made canonical as the graphs of models are."""

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
# Names of captures that are no arguments; no argument can be called so.
OUTPUT, _VALUE, _UNKNOWN = ".output{}", ".value{}", ".unknown{}"


@dataclass(frozen=True)
class Traced:
    """What a function computes.

    Attributes:
        tree: its calls. Tensor arguments are captures under their names, results are called ``OUTPUT``.
        outputs: how many results it has.
        text: the same for trees that are the same.
        calls: the nodes of its calls, by the names of their captures.
        unknown: the nodes behind the captures that stand for what is computed from sizes, by their names.
        region: its graph and the guard of that.
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
    """``function`` as called in ``call``.

    Args:
        free: the sizes that may vary, see ``capture.trace``.
        numbers: values of arguments that any number may take the place of, and the names of these arguments.
        any_device: let calls that name a device name any.

    Raises:
        PatternError: it cannot be traced, or is no pattern: it computes nothing, decides by values, draws random
            numbers, writes in place, or reads tensors that are no arguments.
    """
    module = nn.Module()
    module.forward = _without_defaults_of_use(function)
    try:
        region = trace(module, call, free)
        canonicalise(region.graph)
    except CaptureError as error:
        if isinstance(error.__cause__, GuardOnDataDependentSymNode):
            raise PatternError("values of its arguments decide what it computes: that is no pattern") from error
        raise PatternError(f"it cannot be traced: {error}") from error
    names = dict(zip(region.inputs, region.call.names))
    return _Builder(region, names, numbers or {}, any_device).traced()


def _without_defaults_of_use(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with defaults that no example equals: an argument that does would be left out of the call."""
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
                raise PatternError("it reads a tensor that is no argument of it: make it one")
            elif node.op == "get_attr":
                raise PatternError("it has control flow that runs on the device: that is no pattern")
        trees = [self._trees[node] for node in results]
        tree = trees[0] if len(trees) == 1 else Together(*trees)
        text = "\n".join([*self._lines, f"return {', '.join(str(each.name) for each in trees)}"])
        return Traced(tree, len(trees), text, self._calls, self._unknown, self._region)

    def _results(self) -> list[fx.Node]:
        if self._region.outputs.holds_caches or self._region.is_random or self._region.has_effects:
            raise PatternError("it draws random numbers, or does something besides what it returns")
        made = self._region.outputs.put_together(range(self._region.outputs.count))
        if not all(isinstance(each, int) for each in (made if isinstance(made, (tuple, list)) else [made])):
            raise PatternError("it returns something else than a tensor, or a tuple of tensors")
        (results,) = self._region.graph.output_node().args
        for node in results:
            if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
                raise PatternError("it returns something else than tensors")
            if node.op != "call_function":
                raise PatternError("it returns an argument as it is: that is no result")
            if not node.meta["val"].is_floating_point():
                raise PatternError(f"it returns {node.meta['val'].dtype}: results must be of a floating dtype")
        if not results or len(set(results)) < len(results):
            raise PatternError("it returns nothing, or one tensor twice")
        calls = [node for node in self._region.graph.nodes if node.op == "call_function"]
        if len(calls) > MOST_CALLS:
            raise PatternError(f"it makes {len(calls)} calls of operators; a pattern has {MOST_CALLS} at most")
        return list(results)

    def _call(self, node: fx.Node, results: list[fx.Node]) -> Op:
        if node.target is not operator.getitem and not isinstance(node.target, torch._ops.OpOverload):
            raise PatternError(f"it calls {node.target}, which is no operator")
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
    """Whether a value is a number that follows from free sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _without_defaults(node: fx.Node) -> list[Any]:
    """The arguments of a call but for the last ones, as far as these are the operator's defaults."""
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
    """A number, or a value of a graph that is one, in terms of sizes; None for anything else."""
    value = value.meta.get("val") if isinstance(value, fx.Node) else value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.expr
    return sympy.sympify(value) if isinstance(value, (bool, int, float)) else None
