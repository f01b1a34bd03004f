"""What stands for the matches of a pattern that a user has registered: a function of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inputs import shown
from .base import FusedModule, Plan, takes_plain_path


@dataclass(frozen=True)
class Input:
    """Stands, among arguments, for the tensor with this number among the inputs of a module."""

    number: int


class _Functions(NamedTuple):
    """The user's functions; copies of a module have the same ones. They are no attributes themselves, since a module of
    the user's is to stay in the mode that it is in."""

    reference: Callable[..., Any]
    replacement: Callable[..., Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Functions:
        return self


@dataclass(frozen=True)
class Arguments:
    """How the functions are called: with tensors, and numbers and the like that are fixed."""

    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        def value(argument: Any) -> Any:
            return inputs[argument.number] if isinstance(argument, Input) else argument

        return function(*map(value, self.positional), **{name: value(each) for name, each in self.keywords.items()})

    def __str__(self) -> str:
        def text(argument: Any) -> str:
            return f"%{argument.number}" if isinstance(argument, Input) else repr(argument)

        named = [f"{name}={text(each)}" for name, each in self.keywords.items()]
        return ", ".join([*map(text, self.positional), *named])


class OwnFusion(FusedModule):
    """A user's ``replacement`` for what the ``reference`` computes.

    inputs: tensors of any shapes, floating dtypes and devices that the functions take; the replacement gets them
    contiguous. outputs: a tensor, or a tuple of some, with the shapes and dtypes of the reference's.

    ``arguments``: how both are called; ``title``: what they are called, which tells one such module from another;
    ``exact``: whether the replacement is to give the reference's values, bit for bit.
    Strategies: "replacement" and "composition", the reference. Where a gradient is needed, under autocast and under
    ``torch.compile`` the reference runs.
    """

    live_strategies = ("replacement", "composition")
    lays_out_anew = True
    # Its code may be another in the next process, and would keep the times of this one.
    is_remembered = False

    def __init__(
        self,
        title: str,
        reference: Callable[..., Any],
        replacement: Callable[..., Any],
        arguments: Arguments,
        exact: bool = False,
    ):
        super().__init__()
        self.title, self.arguments, self.exact = title, arguments, exact
        self._functions = _Functions(reference, replacement)
        self._tried: set[tuple[Any, ...]] = set()

    def strategies(self, *inputs: Tensor) -> list[str]:
        """Both, whatever the inputs are: ``plan`` tells whether the replacement takes them."""
        return ["replacement", "composition"]

    def forward(self, *inputs: Tensor) -> Any:
        if takes_plain_path(inputs[0], inputs[1:]) or any(torch.is_grad_enabled() and x.requires_grad for x in inputs):
            return self.reference(*inputs)
        return self.plan(*inputs)(*inputs)

    def plan(self, *inputs: Tensor) -> Plan:
        """See :meth:`FusedModule.plan`. RuntimeError where the replacement does not do what the reference does, as far
        as shapes, dtypes, devices and memory go."""
        if self.choose(*inputs) == "composition":
            return self.reference
        kinds = tuple((x.dtype, x.device) for x in inputs)
        if kinds not in self._tried and not (inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            self.try_out(inputs)
            self._tried.add(kinds)
        return self._replaced

    def reference(self, *inputs: Tensor) -> Any:
        """What the replacement stands for, as the user has written it."""
        return self.arguments.call(self._functions.reference, inputs)

    def _replaced(self, *inputs: Tensor) -> Any:
        return self.arguments.call(self._functions.replacement, [x.contiguous() for x in inputs])

    @torch.no_grad()
    def try_out(self, inputs: Sequence[Tensor]) -> None:
        """RuntimeError, which says in words how, where the replacement fails for these inputs, its results differ from
        the reference's in number, shape, dtype or device, or lie in the memory of an input, or it writes to one."""
        expected = _flat(self.reference(*[x.clone() for x in inputs]))
        given = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
        try:
            results = _flat(self._replaced(*given))
        except Exception as error:  # it is anybody's code
            first_line = str(error).strip().partition("\n")[0]
            raise RuntimeError(f"it raised {type(error).__name__}: {first_line[:200]}") from error
        if len(results) != len(expected):
            raise RuntimeError(f"it returns {len(results)} values, the reference {len(expected)}")
        for result, wanted in zip(results, expected):
            if _kind(result) != _kind(wanted):
                raise RuntimeError(f"it returns {_kind(result)} where the reference returns {_kind(wanted)}")
        memory = {x.untyped_storage().data_ptr() for x in given if x.numel()}
        if any(result.untyped_storage().data_ptr() in memory for result in results):
            raise RuntimeError("a result of it lies in the memory of an argument")
        if not all(map(_equal, inputs, given)):
            raise RuntimeError("it writes to an argument")
        if self.exact and not all(map(_equal, expected, results)):
            raise RuntimeError("its values are not those of the reference, bit for bit")

    def extra_repr(self) -> str:
        return f"{self.title}({self.arguments})"


def _flat(result: Any) -> list[Any]:
    """A tensor, or several in a tuple or list, as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _equal(before: Tensor, after: Tensor) -> bool:
    """Whether two tensors of one kind hold the same; a NaN is as any other."""
    return bool(((before == after) | ((before != before) & (after != after))).all())


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{shown(value)} on {value.device}"
