"""A user-defined pattern: its trees, the refusal of matches, and the replacing module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from ..graph import Either, Op, fixed_size, parts, unify
from ..inputs import ExampleCall, described
from ..matching import Match, Pattern, Replacement
from ..modules import Arguments, Input, OwnFusion
from ..region import Dimensions
from .errors import PatternError
from .match import OwnMatch, matched
from .promotion import computes_alike
from .tracing import OUTPUT, Traced, expression, traced

FLOATING = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MOST_KINDS = 256  # kinds of arguments with a cached trace of the reference
# Difference of a number between two traces.
_STEP = 1.0 / 1024


@dataclass(frozen=True)
class Source:
    """The arguments of ``register_pattern``."""

    name: str
    reference: Callable[..., Any]
    replacement: Callable[..., Any]
    when: Callable[[OwnMatch], Any] | None
    numerics: str | float
    call: ExampleCall

    @property
    def example(self) -> Any:
        """Returns the example inputs as JSON; None if they cannot be described."""
        return described(self.call.kwargs or self.call.args)


class OwnPattern:
    """Creates the Pattern of a ``source``. Raises PatternError."""

    def __init__(self, source: Source, arguments: dict[str, Any]):
        self._source, self._arguments = source, arguments
        self.tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        self._numbers = [name for name, value in arguments.items() if isinstance(value, float)]
        self._known: dict[Any, Traced | str] = {}

    def pattern(self) -> Pattern:
        source = self._source
        found = self._traces()
        tree = found[0].tree if len(found) == 1 else Either(*(each.tree for each in found))
        outputs = found[0].outputs
        numerics = source.numerics if isinstance(source.numerics, str) else "approximate"
        return Pattern(
            name=source.name,
            tree=tree,
            anchor=OUTPUT.format(0),
            numerics=numerics,
            refusal=self._refusal,
            build=self._build,
            kept=frozenset(OUTPUT.format(number) for number in range(outputs) if outputs > 1),
            source=source,
            tolerance=0.0 if isinstance(source.numerics, str) else source.numerics,
        )

    def fusion(self, numbers: dict[str, float]) -> OwnFusion:
        """Creates the module that replaces a match with these numbers."""
        source, places = self._source, {name: Input(index) for index, name in enumerate(self.tensors)}
        call = self._call(self._arguments | numbers | places)
        arguments = Arguments(call.args, call.kwargs)
        return OwnFusion(source.name, source.reference, source.replacement, arguments, source.numerics == "exact")

    def _traces(self) -> list[Traced]:
        """The traces of the reference, one per floating-point dtype, because casts differ."""
        first = self._trace(self._arguments)
        self._check(first)
        floating = {v.dtype for v in self._arguments.values() if isinstance(v, Tensor) and v.is_floating_point()}
        found = {first.text: first}
        for dtype in FLOATING if len(floating) == 1 else ():
            if dtype in floating:
                continue
            try:
                other = self._trace({name: _in(dtype, value) for name, value in self._arguments.items()})
            except PatternError:  # an operator does not support this dtype
                continue
            if other.outputs == first.outputs:
                found.setdefault(other.text, other)
        return list(found.values())

    def _trace(self, values: dict[str, Any]) -> Traced:
        """The trace of the reference for arguments like these, of any sizes and with any numbers."""
        try:
            return self._with_free_sizes(values, 1)
        except PatternError:  # broadcast sizes of 1 cannot vary
            return self._with_free_sizes(values, 2)

    def _with_free_sizes(self, values: dict[str, Any], least: int) -> Traced:
        free = {
            f"{name}_{dimension}": [(index, dimension)]
            for index, (name, value) in enumerate(values.items())
            if isinstance(value, Tensor)
            for dimension, size in enumerate(value.shape)
            if size >= least
        }
        first = self._with_numbers(values, free, 1)
        if self._numbers and self._with_numbers(values, free, 2).text != first.text:
            names = " or ".join(self._numbers)
            raise PatternError(f"it computes with the number {names} in Python, but only operators may use it")
        return first

    def _with_numbers(self, values: dict[str, Any], free: dict[str, Dimensions], steps: int) -> Traced:
        """A trace with other numbers than the example's, which distinguishes numbers from constants."""
        shifted = {
            name: values[name] * (1 + (index + steps * len(self._numbers)) * _STEP) + steps * _STEP / 7
            for index, name in enumerate(self._numbers)
        }
        names = {value: name for name, value in shifted.items()}
        return traced(self._source.reference, self._call(values | shifted), free, names, any_device=True)

    def _check(self, first: Traced) -> None:
        """Raises PatternError if the reference does not use an argument, or a result is unrelated to others."""
        captured = _captures(first)
        for name in (*self.tensors, *self._numbers):
            if not any(name in names for names in captured):
                raise PatternError(f"it does not use its argument {name}")
        known = captured[0]
        for number, names in enumerate(captured[1:], 1):
            if known.isdisjoint(names):
                raise PatternError(
                    f"its result {number} shares no argument with previous results: register a separate pattern"
                )
            known |= names

    def _call(self, values: dict[str, Any]) -> ExampleCall:
        count, names = len(self._source.call.args), list(values)
        return ExampleCall(
            tuple(values[name] for name in names[:count]), {name: values[name] for name in names[count:]}
        )

    def _refusal(self, match: Match) -> str | None:
        """The reason why ``match`` must not be fused, or None: argument kinds, another computation, or ``when``."""
        for name in self.tensors:
            value = match.captures[name]
            if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), Tensor):
                return f"the argument {name} is not a tensor"
            found, example = value.meta["val"], self._arguments[name]
            if found.is_floating_point() != example.is_floating_point():
                return f"the argument {name} has dtype {found.dtype}, in the example {example.dtype}"
        for name, number in self._numbers_of(match).items():
            given = match.captures[name]
            if isinstance(given, int) and given != number:
                return f"the argument {name} is {given}, which is not exact as a float"
        return (
            self._other_shapes(match)
            or self._other_computation(match)
            or _order_refusal(match, self.tensors)
            or self._unwanted(match)
        )

    def _other_shapes(self, match: Match) -> str | None:
        """The reason if tensors are broadcast in ``match`` but not in the example, else None."""
        alike: dict[torch.Size, list[str]] = {}
        for name in self.tensors:
            alike.setdefault(self._arguments[name].shape, []).append(name)
        for first, *others in alike.values():
            for name in others:
                found = [str(match.captures[each].meta["val"].shape) for each in (first, name)]
                if found[0] != found[1]:
                    return f"{first} and {name} have equal shapes in the example, but not here"
        return None

    def _numbers_of(self, match: Match) -> dict[str, float]:
        return {name: float(match.captures[name]) for name in self._numbers}

    def _other_computation(self, match: Match) -> str | None:
        """The reason if ``match`` differs from the reference for such arguments, else None.

        The reference is traced with the same fixed sizes, dtypes and devices, and the same free sizes."""
        tensors = {name: match.captures[name].meta["val"] for name in self.tensors}
        numbers = self._numbers_of(match)
        key = (tuple(map(_kind, tensors.values())), tuple(numbers.values()))
        if key not in self._known:
            if len(self._known) >= MOST_KINDS:
                self._known.clear()
            try:
                self._known[key] = self._trace_for(tensors, numbers)
            except PatternError as error:
                self._known[key] = f"with the arguments of this match, {error}"
        known = self._known[key]
        if isinstance(known, str):
            return known
        reason = "with the arguments of this match, the reference computes something else"
        for binding in unify(known.tree, match.root):
            same = all(binding.captures[name] is match.captures[name] for name in self.tensors)
            if same and _has_sizes(known, binding.captures, tensors):
                if all(computes_alike(call, binding.captures[name]) for name, call in known.calls.items()):
                    return None
                reason = "an int in place of a float, or a float in place of an int, changes the computation dtype"
        return reason

    def _trace_for(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> Traced:
        free: dict[str, Dimensions] = {}
        values = self._arguments | numbers
        for index, (name, value) in enumerate(values.items()):
            if name in tensors:
                values[name] = _example_of(tensors[name])
                for dimension, size in enumerate(tensors[name].shape):
                    if fixed_size(size) is None:
                        free.setdefault(str(size), []).append((index, dimension))
        found = traced(self._source.reference, self._call(values), free)
        guard = found.region.guard
        if guard.constraints or any(not isinstance(guard.size(places[0]), sympy.Symbol) for places in free.values()):
            raise PatternError("the computation of the reference depends on free sizes")
        return found

    def _unwanted(self, match: Match) -> str | None:
        """The reason why the user's ``when`` rejects ``match``, or None."""
        when = self._source.when
        if when is None:
            return None
        values = {name: matched(match.captures[name]) for name in self.tensors} | self._numbers_of(match)
        try:
            answer = when(OwnMatch(self._source.name, match.site, values))
        except Exception as error:  # user code may raise anything
            return f"when(match) raised {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        if isinstance(answer, str):
            return answer
        return None if answer else "when(match) rejects it"

    def _build(self, match: Match, tensor: Callable[[fx.Node], Tensor]) -> Replacement:
        inputs = tuple(match.captures[name] for name in self.tensors)
        kept = [OUTPUT.format(number) for number in range(len(match.pattern.kept))]
        outputs = [match.captures[name] for name in kept] or [match.root]
        return Replacement(self.fusion(self._numbers_of(match)), inputs, (), tuple(outputs))


def _captures(found: Traced) -> list[set[str]]:
    """The capture names in the tree of each result."""
    trees = (found.tree,) if isinstance(found.tree, Op) else found.tree.trees
    return [{part.name for part in parts(tree) if getattr(part, "name", None)} for tree in trees]


def _order_refusal(match: Match, tensors: list[str]) -> str | None:
    """The reason why one call cannot replace a match with several results, or None. The call comes after all of its
    arguments, and before all readers of its results."""
    if len(match.pattern.kept) < 2:
        return None
    order = {node: index for index, node in enumerate(match.root.graph.nodes)}
    outputs = [match.captures[name] for name in match.pattern.kept]
    readers = [order[user] for output in outputs for user in output.users if user not in match.nodes]
    last = max(order[match.captures[name]] for name in tensors)
    too_early = any(reader <= last for reader in readers)
    return "a result is used before all arguments are available" if too_early else None


def _in(dtype: torch.dtype, value: Any) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tuple(map(str, tensor.shape)), tuple(map(str, tensor.stride()))


def _example_of(tensor: Tensor) -> Tensor:
    """A tensor with the sizes, strides, dtype and device of a traced tensor, with arbitrary values."""
    sizes, strides = ([_hint(each) for each in numbers] for numbers in (tensor.shape, tensor.stride()))
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device=tensor.device)


def _hint(size: Any) -> int:
    """The value of a size during tracing."""
    return size if isinstance(size, int) else int(size.node.hint)


def _has_sizes(known: Traced, captures: dict[str, Any], tensors: dict[str, Tensor]) -> bool:
    """Whether values computed from sizes in the reference's trace are computed from the same sizes in the match."""
    guard, names = known.region.guard, known.region.call.names
    sizes = {}
    for index, name in enumerate(names):
        for dimension, size in enumerate(tensors[name].shape if name in tensors else ()):
            own = guard.size((index, dimension))
            if isinstance(own, sympy.Symbol):
                sizes[own] = expression(size)
    for name, node in known.unknown.items():
        found, wanted = expression(captures[name]), expression(node)
        if found is None or wanted is None:
            return False
        wanted = wanted.subs(sizes, simultaneous=True)
        if found != wanted and sympy.simplify(found - wanted) != 0:
            return False
    return True
