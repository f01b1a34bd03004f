"""Guards of captured regions: argument types, dtypes, devices, sizes, and constraints from the trace."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.utils._sympy.functions import Max, Min

from ..inputs import is_equal, shown

try:
    from .._C import tensor_key as _tensor_key  # compiled (csrc/watch.h)
except ImportError:  # see kfconvert doctor

    def _tensor_key(leaves: list[Any], indices: tuple[int, ...]) -> bytes | None:
        return None


# The position of a free size in the flat arguments: (index of the argument, dimension).
Dimensions = list[tuple[int, int]]

_TENSOR_TYPES = (Tensor, torch.nn.Parameter)
# Maximum number of cached results for combinations of sizes.
MAX_VERDICTS = 256


@dataclass
class TensorGuard:
    """The conditions on a tensor argument. ``sizes`` has an int for a fixed and an expression for a free dimension."""

    index: int
    dtype: torch.dtype
    device: torch.device
    sizes: tuple[int | sympy.Expr, ...]

    def refusal(self, value: Tensor) -> str | None:
        if value.dtype is not self.dtype:
            return f"argument {self.index} has dtype {value.dtype}, was traced with {self.dtype}"
        if value.device != self.device:
            return f"argument {self.index} is on {value.device}, was traced on {self.device}"
        if value.layout is not torch.strided:
            return f"argument {self.index} has the layout {value.layout}"
        if value.dim() != len(self.sizes):
            return f"argument {self.index} has {value.dim()} dimensions, was traced with {len(self.sizes)}"
        return None


@dataclass
class Guard:
    """The conditions on the arguments of a region, with a cache of earlier results."""

    tensors: list[TensorGuard]
    constants: list[tuple[int, Any]]
    constraints: list[sympy.Basic]
    ranges: dict[sympy.Symbol, tuple[int, int | None]]
    # The dimensions of each free size: "batch" and "sequence" -> (argument index, dimension). They are equal in the
    # traced call and must be equal in any other call, even if the graph does not depend on it.
    free: dict[str, Dimensions]
    # Tracing assumes that a free size is at least 2. Sizes of 1 are allowed for these symbols, after a run of the
    # region with that size was compared with the original.
    one_is_safe: set[sympy.Symbol] = field(default_factory=set)
    # Tracing assumes that all tensors are distinct. For arguments that may be one tensor, see ``given_as``.
    may_be_one: set[tuple[int, ...]] = field(default_factory=set)
    _verdicts: dict[bytes | tuple[Any, ...], str | None] = field(default_factory=dict, compare=False)

    def __post_init__(self):
        self._indices = tuple(guard.index for guard in self.tensors)

    def refusal(self, leaves: list[Any]) -> str | None:
        """Returns None if the region may run on these flat arguments, else the reason."""
        key: bytes | tuple[Any, ...] | None = _tensor_key(leaves, self._indices)
        if key is None:
            tensors = [leaves[index] for index in self._indices]
            for index, value in zip(self._indices, tensors):
                if type(value) not in _TENSOR_TYPES or value.is_nested:
                    kind = "nested" if isinstance(value, Tensor) and value.is_nested else type(value).__name__
                    return f"argument {index} is {kind}, not a plain tensor"
            kinds = [(value.dtype, value.device, value.layout, value.shape) for value in tensors]
            key = (*kinds, given_as(tensors))
        for index, expected in self.constants:
            value = leaves[index]
            if not _is_same(value, expected):
                return f"argument {index} is {shown(value)}, was traced as {shown(expected)}"
        try:
            return self._verdicts[key]
        except KeyError:
            verdict = self._judge([leaves[guard.index] for guard in self.tensors])
            if len(self._verdicts) >= MAX_VERDICTS:
                self._verdicts.clear()
            self._verdicts[key] = verdict
            return verdict

    def admit_one(self, name: str) -> None:
        """Allows size 1 for the free size ``name``."""
        sizes = (self.size(place) for place in self.free[name])
        self.one_is_safe.update(size for size in sizes if isinstance(size, sympy.Symbol))
        self._verdicts.clear()

    def _values(self, shapes: list[torch.Size]) -> dict[sympy.Symbol, int]:
        values: dict[sympy.Symbol, int] = {}
        for guard, shape in zip(self.tensors, shapes):
            for size, actual in zip(guard.sizes, shape):
                if isinstance(size, sympy.Symbol):
                    values.setdefault(size, actual)
        return values

    def admit_one_for_several(self, leaves: list[Any]) -> None:
        """Allows the arguments that are the same tensor in ``leaves`` to be the same in other calls."""
        self.may_be_one.add(given_as([leaves[index] for index in self._indices]))
        self._verdicts.clear()

    def bounds(self, symbol: sympy.Symbol) -> tuple[int, int | None]:
        """Returns the smallest and the largest value of a free size; None if there is no largest."""
        lower, upper = self.ranges.get(symbol, (0, None))
        return 1 if lower == 2 and symbol in self.one_is_safe else lower, upper

    def size(self, place: tuple[int, int]) -> int | sympy.Expr:
        """Returns the required size at ``place``."""
        index, dimension = place
        return next(guard.sizes[dimension] for guard in self.tensors if guard.index == index)

    def _judge(self, tensors: list[Tensor]) -> str | None:
        for guard, tensor in zip(self.tensors, tensors):
            reason = guard.refusal(tensor)
            if reason is not None:
                return reason
        same = given_as(tensors)
        if len(set(same)) < len(same) and same not in self.may_be_one:
            return "several arguments are the same tensor, which the forward may check"
        return self._judge_sizes([tensor.shape for tensor in tensors])

    def _judge_sizes(self, shapes: list[torch.Size]) -> str | None:
        sizes = {guard.index: shape for guard, shape in zip(self.tensors, shapes)}
        for name, dimensions in self.free.items():
            found = {sizes[index][dimension] for index, dimension in dimensions}
            if len(found) > 1:
                return f"the arguments disagree on the {name} size: {sorted(found)}"
        values = self._values(shapes)
        # The tensors of a cache share a few sizes, and lengths differ in every call.
        known: dict[Any, Any] = dict(values)
        for guard, shape in zip(self.tensors, shapes):
            for dimension, (size, actual) in enumerate(zip(guard.sizes, shape)):
                if isinstance(size, int):
                    expected = size
                elif size in known:
                    expected = known[size]
                else:
                    expected = known[size] = size.subs(values)
                if expected != actual:
                    return (
                        f"argument {guard.index} has size {actual} in dimension {dimension}, "
                        f"the trace allows {size if isinstance(size, int) else expected}"
                    )
        for symbol, (lower, upper) in self.ranges.items():
            size = values.get(symbol)
            if size is None:
                continue
            if size < lower and not (size == 1 and lower == 2 and symbol in self.one_is_safe):
                return f"a free size of {size} is below the traced minimum of {lower}"
            if upper is not None and size > upper:
                return f"a free size of {size} is above the traced maximum of {upper}"
        for constraint in self.constraints:
            if constraint.subs(values) != sympy.true:
                return f"the traced condition {constraint} does not hold for these sizes"
        return None


def given_as(tensors: list[Tensor]) -> tuple[int, ...]:
    """Returns for each tensor the index of the first identical tensor."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), index) for index, tensor in enumerate(tensors))


def _is_same(value: Any, expected: Any) -> bool:
    if value is expected or is_equal(value, expected):
        return True
    return type(value) is type(expected) and type(value) not in (float, complex) and value == expected


def guard_from_placeholders(values: list[Any], free: dict[str, Dimensions]) -> Guard:
    """Returns the guard for user inputs with the traced values (fake tensors or constants) ``values``.

    ``free``: the dimensions of free sizes, by name. Sizes that the trace fixed are dropped.

    Raises:
        ValueError: a size depends on symbols that are not the size of an input dimension.
    """
    tensors, constants = [], []
    ranges: dict[sympy.Symbol, tuple[int, int | None]] = {}
    environment: Any = None
    for index, value in enumerate(values):
        if not isinstance(value, Tensor):
            constants.append((index, value))
            continue
        sizes = []
        for size in value.shape:
            if isinstance(size, torch.SymInt) and not size.node.expr.is_number:
                environment = size.node.shape_env
                sizes.append(size.node.expr)
                for symbol in size.node.expr.free_symbols:
                    bounds = environment.var_to_range[symbol]
                    upper = int(bounds.upper) if isinstance(bounds.upper, sympy.Integer) else None
                    ranges[symbol] = (int(bounds.lower), upper)
            else:
                sizes.append(int(size))
        tensors.append(TensorGuard(index, value.dtype, value.device, tuple(sizes)))
    # Equal sizes share a symbol in the shapes, but conditions may still name the other one.
    conditions = dict.fromkeys(environment.replace(guard.expr) for guard in environment.guards) if environment else ()
    constraints = [condition for condition in conditions if not _holds(condition)]
    carried = {size for guard in tensors for size in guard.sizes if isinstance(size, sympy.Symbol)}
    needed = set(ranges).union(*(constraint.free_symbols for constraint in constraints))
    if not needed <= carried:
        raise ValueError(f"sizes depend on {sorted(map(str, needed - carried))}, which no input dimension shows")
    by_index = {guard.index: guard for guard in tensors}
    free = {
        name: dimensions
        for name, dimensions in free.items()
        if all(not isinstance(by_index[index].sizes[dimension], int) for index, dimension in dimensions)
    }
    return Guard(tensors, constants, constraints, ranges, free)


def _holds(condition: sympy.Basic) -> bool:
    """Whether ``condition`` is true for all sizes. SymPy can compare 8 s with 16 s, unlike PyTorch's minimum, which is
    optimized for speed."""
    for own, general in ((Min, sympy.Min), (Max, sympy.Max)):
        condition = condition.replace(own, general)
    return bool(condition == sympy.true)
