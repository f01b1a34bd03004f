"""The guard of a region for compilers: sizes may be symbols of theirs, of which it asks only what they know already."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import CleanDiv, FloorDiv, Mod, PythonMod
from torch.utils._sympy.printers import PythonPrinter

if TYPE_CHECKING:
    from .guard import Guard

# Plain tensors, and what torch.export has in their places.
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor, FunctionalTensor)
# What can be asked of symbolic sizes without an answer that binds them.
_ARITHMETIC = (
    sympy.core.relational.Relational,
    sympy.Add,
    sympy.Mul,
    sympy.Symbol,
    sympy.Integer,
    FloorDiv,
    CleanDiv,
    Mod,
    PythonMod,
)


def is_comparable(value: Any) -> bool:
    """Whether what equals ``value``, and is of its type, is the same in every way; 0.0 also equals -0.0."""
    return type(value) in (bool, int, str, type(None)) or (type(value) is float and value != 0)


def is_known_to_be(value: Any, expected: Any) -> bool:
    """Whether a compiler that traces this knows that ``value`` is ``expected``, which is comparable."""
    return type(value) is type(expected) and statically_known_true(value == expected)


class UntraceableGuard(ValueError):
    """The conditions of a guard cannot be written so that a compiler can follow them; the message says which."""


class SymbolicGuard:
    """The conditions of ``guard`` in plain Python, which torch.compile and torch.export can follow.

    It adds no condition to those of their traces: what does not follow from these counts as not met. So a size that the
    region has fixed must be fixed there as well; a free one may be free.

    Raises:
        UntraceableGuard: a condition has no form that can be traced.
    """

    def __init__(self, guard: Guard):
        for index, value in guard.constants:
            if not is_comparable(value):
                raise UntraceableGuard(f"argument {index} is a {type(value).__name__}")
        self._constants = tuple(guard.constants)
        self._kinds = tuple((each.index, each.dtype, each.device, len(each.sizes)) for each in guard.tensors)
        sizes = [((each.index, i), size) for each in guard.tensors for i, size in enumerate(each.sizes)]
        symbols: dict[sympy.Symbol, tuple[int, int]] = {}
        for place, size in sizes:
            if isinstance(size, sympy.Symbol):
                symbols.setdefault(size, place)
        self._places = tuple(symbols.values())
        names = list(symbols)
        self._fixed = tuple((place, size) for place, size in sizes if isinstance(size, int))
        self._computed = tuple(
            (place, _function(names, size)) for place, size in sizes if not isinstance(size, (int, sympy.Symbol))
        )
        self._equal = (
            *(
                (symbols[size], place)
                for place, size in sizes
                if isinstance(size, sympy.Symbol) and symbols[size] != place
            ),
            *((first, place) for first, *places in guard.free.values() for place in places),
        )
        self._bounds = tuple(guard.bounds(symbol) for symbol in names)
        constraints = (constraint for constraint in guard.constraints if constraint != sympy.true)
        self._constraints = tuple(_function(names, constraint) for constraint in constraints)
        self._may_be_one = tuple(guard.may_be_one)

    def admits(self, leaves: list[Any], named: bool = False) -> bool:
        """Whether the region may run on these flat arguments, as far as the compiler knows of them.

        Args:
            named: sizes to which the caller of torch.export gave one name are equal; else it looks at that in the end.
        """
        for index, expected in self._constants:
            if not is_known_to_be(leaves[index], expected):
                return False
        for index, dtype, device, dimensions in self._kinds:
            tensor = leaves[index]
            if type(tensor) not in _PLAIN or tensor.is_nested or tensor.dtype != dtype or tensor.device != device:
                return False
            if tensor.layout is not torch.strided or tensor.dim() != dimensions:
                return False
        if named:
            for (index, dimension), (other, at) in self._equal:
                _make_one(leaves[index].shape[dimension], leaves[other].shape[at])
        for condition in self._conditions(leaves):
            if not statically_known_true(condition):
                return False
        return self._admits_aliases(leaves)

    def _conditions(self, leaves: list[Any]) -> list[Any]:
        """What must be true of the sizes of ``leaves``, which are of the right kinds: a comparison of them each."""
        sizes = [leaves[index].shape[dimension] for index, dimension in self._places]
        found = [leaves[index].shape[dimension] == size for (index, dimension), size in self._fixed]
        for (index, dimension), (other, at) in self._equal:
            found.append(leaves[index].shape[dimension] == leaves[other].shape[at])
        for (lower, upper), size in zip(self._bounds, sizes):
            found.append(size >= lower)
            if upper is not None:
                found.append(size <= upper)
        for (index, dimension), function in self._computed:
            found.append(leaves[index].shape[dimension] == function(*sizes))
        for constraint in self._constraints:
            found.append(constraint(*sizes))
        return found

    def held_to_sizes(self, leaves: list[Any]) -> list[Any] | None:
        """Views of ``leaves`` that torch.jit.trace can only make again of tensors with admissible sizes; None where the
        conditions are others than that sizes are fixed, or equal. (Its graphs keep no assertions.)"""
        if self._computed or self._constraints or any(lower > 1 or upper is not None for lower, upper in self._bounds):
            return None
        held = list(leaves)
        for (index, dimension), size in self._fixed:
            held[index] = torch.split_with_sizes(held[index], [size], dimension)[0]
        for (index, dimension), (other, at) in self._equal:
            held[other] = torch.split_with_sizes(held[other], [leaves[index].shape[dimension]], at)[0]
        return held

    def _admits_aliases(self, leaves: list[Any]) -> bool:
        tensors = [leaves[index] for index, *_ in self._kinds]
        same = []
        for tensor in tensors:
            for index, other in enumerate(tensors):
                if tensor is other:
                    same.append(index)
                    break
        return same == list(range(len(tensors))) or tuple(same) in self._may_be_one


def _make_one(size: Any, other: Any) -> None:
    """Let the trace know that two sizes of one name are equal."""
    if _names(size) & _names(other):
        bool(size == other)


def _names(size: Any) -> set[str]:
    """What the caller of torch.export calls ``size``; PyTorch keeps that for its messages, and does not document it."""
    try:
        environment = size.node.shape_env
        sources = [source.name for source in environment.var_to_sources[size.node.expr]]
        names = environment.source_name_to_debug_name
        return {names[source if isinstance(source, str) else source()] for source in sources}
    except (AttributeError, KeyError):  # a number, or a size without a name
        return set()


def _function(symbols: list[sympy.Symbol], expression: sympy.Basic) -> Callable[..., Any]:
    """``expression`` as a function of the values of ``symbols``."""
    for part in sympy.preorder_traversal(expression):
        if not isinstance(part, _ARITHMETIC):
            raise UntraceableGuard(f"its sizes have to meet {expression}")
    arguments = ", ".join(map(str, symbols))
    return eval(f"lambda {arguments}: {PythonPrinter().doprint(expression)}")  # noqa: S307 - no text of a user's
