"""The pattern language: trees of operator calls with named captures, and their unification with graphs."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Union

import torch
from torch import fx

from .schemas import schema_of

aten = torch.ops.aten

_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor}


@dataclass(frozen=True)
class Var:
    """Matches any value. The same name must match the same value everywhere in the tree."""

    name: str


IN_FLOAT64 = 1e-9


@dataclass(frozen=True)
class Number:
    """Matches a Python number: exactly if it is a multiple of 0.5, else within the relative ``tolerance``, because
    models write constants with few digits. In calls with float64 results, the tolerance is ``IN_FLOAT64``. An int
    matches an equal float, even if the call computes in another dtype with it."""

    value: float
    tolerance: float = 1e-5

    def matches(self, value: float) -> bool:
        exact = float(2 * self.value).is_integer()
        return value == self.value if exact else math.isclose(value, self.value, rel_tol=self.tolerance)


@dataclass(frozen=True)
class AnyNumber:
    """Captures a Python number as ``name``. A tensor does not match."""

    name: str


@dataclass(frozen=True, init=False)
class Op:
    """Matches a call of ``target``. ``args`` follow the operator's schema. Omitted arguments must have their default.

    A list among the arguments matches a list of the same length.

    ``name``, if given, captures the result of the call. The same name must match the same call everywhere.
    """

    target: Any
    args: tuple[Any, ...]
    name: str | None

    def __init__(self, target: Any, *args: Any, name: str | None = None):
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "args", args)
        object.__setattr__(self, "name", name)


@dataclass(frozen=True, init=False)
class Either:
    """Matches any of its options, which are tried in order."""

    options: tuple[Any, ...]

    def __init__(self, *options: Any):
        object.__setattr__(self, "options", options)


@dataclass(frozen=True, init=False)
class Together:
    """Matches several named calls of one graph: the first is the root, and each of the others shares a capture with
    previous ones."""

    trees: tuple[Op, ...]

    def __init__(self, *trees: Op):
        object.__setattr__(self, "trees", trees)


Tree = Union[Var, Number, AnyNumber, Op, Either, Together, Any]


@dataclass(frozen=True)
class Binding:
    """A match of a tree: captured values by name, and the distinct covered calls, root first."""

    captures: dict[str, Any]
    nodes: tuple[fx.Node, ...]


def roots(tree: Tree) -> tuple[Any, ...]:
    """Returns the operators that may be the outermost call of a match of ``tree``."""
    if isinstance(tree, Either):
        return tuple(dict.fromkeys(target for option in tree.options for target in roots(option)))
    if isinstance(tree, Together):
        return roots(tree.trees[0])
    return (tree.target,) if isinstance(tree, Op) else ()


def required(tree: Tree) -> frozenset[Any]:
    """Returns operators that every match of ``tree`` calls."""
    known: dict[int, frozenset[Any]] = {}  # by the id of a part, as alternatives share parts

    def of(part: Any) -> frozenset[Any]:
        if id(part) not in known:
            inner = part.args if isinstance(part, Op) else part.trees if isinstance(part, Together) else part
            if isinstance(part, Either):
                known[id(part)] = frozenset.intersection(*map(of, part.options))
            else:
                own = (part.target,) if isinstance(part, Op) else ()
                known[id(part)] = frozenset(own).union(*map(of, inner if isinstance(inner, (list, tuple)) else ()))
        return known[id(part)]

    return of(tree)


def parts(tree: Tree) -> list[Any]:
    """Returns the distinct parts of ``tree``, outer parts first. Parts that alternatives share are listed once."""
    seen: set[int] = set()
    found, waiting = [], [tree]
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen.add(id(part))
            found.append(part)
            if isinstance(part, Op):
                waiting += reversed(part.args)
            elif isinstance(part, (Either, Together)):
                waiting += reversed(part.options if isinstance(part, Either) else part.trees)
            elif isinstance(part, (list, tuple)):
                waiting += reversed(part)
    return found


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Returns the arguments of an ATen call in schema order, with defaults, keyword-only arguments last.

    ``operator.getitem``, which selects a tensor of a call's results, has two arguments.
    """
    if node.target is operator.getitem:
        return node.args
    args, kwargs, schema = node.args, node.kwargs, schema_of(node.target)
    omitted = schema.defaults[len(args) :]
    if kwargs:
        omitted = tuple(kwargs.get(name, default) for name, default in zip(schema.names[len(args) :], omitted))
    return (*args, *omitted)


def unify(tree: Tree, value: Any, binding: Binding = Binding({}, ())) -> Iterator[Binding]:
    """Yields every match of ``value`` (a node or a constant argument) with ``tree``."""
    if isinstance(tree, AnyNumber):
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield from unify(Var(tree.name), value, binding)
    elif isinstance(tree, Var):
        if tree.name not in binding.captures:
            yield Binding({**binding.captures, tree.name: value}, binding.nodes)
        elif _same(binding.captures[tree.name], value):
            yield binding
    elif isinstance(tree, Op):
        if isinstance(value, fx.Node) and value.op == "call_function" and value.target == tree.target:
            yield from _unify_call(tree, value, binding)
    elif isinstance(tree, Either):
        for option in tree.options:
            yield from unify(option, value, binding)
    elif isinstance(tree, Together):
        for found in unify(tree.trees[0], value, binding):
            yield from _unify_elsewhere(tree.trees[1:], value.graph, found)
    elif isinstance(tree, Number):
        if isinstance(value, (int, float)) and tree.matches(value):
            yield binding
    elif isinstance(tree, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(tree) == len(value):
            yield from _unify_all(tuple(tree), tuple(value), binding)
    elif _same(tree, value):
        yield binding


def _unify_call(tree: Op, node: fx.Node, binding: Binding) -> Iterator[Binding]:
    if tree.name in binding.captures:
        if binding.captures[tree.name] is node:
            yield binding
        return
    captures = binding.captures if tree.name is None else {**binding.captures, tree.name: node}
    start = Binding(captures, binding.nodes if node in binding.nodes else (*binding.nodes, node))
    actual = arguments(node)
    expected = tree.args + _defaults(node)[len(tree.args) :]
    if getattr(node.meta.get("val"), "dtype", None) is torch.float64:
        expected = tuple(replace(each, tolerance=IN_FLOAT64) if isinstance(each, Number) else each for each in expected)
    yield from _unify_all(expected, actual, start)
    if node.target in _COMMUTATIVE and len(tree.args) == 2:
        yield from _unify_all((expected[1], expected[0], *expected[2:]), actual, start)


def _unify_elsewhere(trees: tuple[Op, ...], graph: fx.Graph, binding: Binding) -> Iterator[Binding]:
    """Every match of calls of ``graph`` with the ``trees``, without calls already in ``binding``."""
    if not trees:
        yield binding
    elif trees[0].name in binding.captures:  # it is inside a previous match
        yield from _unify_elsewhere(trees[1:], graph, binding)
    else:
        for node in graph.find_nodes(op="call_function", target=trees[0].target):
            for found in unify(trees[0], node, binding) if node not in binding.nodes else ():
                yield from _unify_elsewhere(trees[1:], graph, found)


def _defaults(node: fx.Node) -> tuple[Any, ...]:
    if node.target is operator.getitem:
        return ()
    return schema_of(node.target).defaults


def _unify_all(trees: tuple[Tree, ...], values: tuple[Any, ...], binding: Binding) -> Iterator[Binding]:
    if not trees:
        yield binding
        return
    for first in unify(trees[0], values[0], binding):
        yield from _unify_all(trees[1:], values[1:], first)


def _same(expected: Any, value: Any) -> bool:
    if isinstance(expected, fx.Node) or isinstance(value, fx.Node):
        return expected is value
    return (
        type(expected) is type(value)
        and expected == value
        or (isinstance(expected, (int, float)) and isinstance(value, (int, float)) and expected == value)
    )
