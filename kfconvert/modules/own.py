"""The module that replaces matches of a registered pattern with a user-defined function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..accuracy import is_same_tensor
from ..inputs import shown
from .base import FusedModule, Plan, takes_plain_path


@dataclass(frozen=True)
class Input:
    """A placeholder among arguments for the input tensor with this index."""

    number: int


class _Functions(NamedTuple):
    """The user's functions, which copies of a module share. They are not attributes, because a user's module must not
    change its mode with this one."""

    reference: Callable[..., Any]
    replacement: Callable[..., Any]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Functions:
        return self


@dataclass(frozen=True)
class Arguments:
    """The arguments of the functions: tensors, and constants such as numbers."""

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
    """A user's ``replacement`` for the function ``reference``.

    inputs: tensors of any shapes, floating-point dtypes and devices that the functions accept; the replacement gets
    contiguous tensors. outputs: a tensor or a tuple of tensors, with the shapes and dtypes of the reference's.

    ``arguments``: arguments of both functions; ``title``: their name, which identifies such a module; ``exact``:
    whether the replacement must return the reference's values bit for bit.
    Strategies: "replacement" and "composition" (the reference). If a gradient is needed, under autocast and under
    ``torch.compile``, the reference runs.
    """

    live_strategies = ("replacement", "composition")
    lays_out_anew = True
    # The user's code may change between processes, so stored times would be stale.
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
        """Returns both for any inputs. ``plan`` checks whether the replacement accepts the inputs."""
        return ["replacement", "composition"]

    def forward(self, *inputs: Tensor) -> Any:
        if takes_plain_path(inputs[0], inputs[1:]) or any(torch.is_grad_enabled() and x.requires_grad for x in inputs):
            return self.reference(*inputs)
        return self.plan(*inputs)(*inputs)

    def plan(self, *inputs: Tensor) -> Plan:
        """Raises RuntimeError if the replacement's results differ from the reference's in
        shape, dtype, device or memory use."""
        if self.choose(*inputs) == "composition":
            return self.reference
        kinds = tuple((x.dtype, x.device) for x in inputs)
        if kinds not in self._tried and not (inputs[0].is_cuda and torch.cuda.is_current_stream_capturing()):
            self.try_out(inputs)
            self._tried.add(kinds)
        return self._replaced

    def reference(self, *inputs: Tensor) -> Any:
        return self.arguments.call(self._functions.reference, inputs)

    def _replaced(self, *inputs: Tensor) -> Any:
        return self.arguments.call(self._functions.replacement, [x.contiguous() for x in inputs])

    @torch.no_grad()
    def try_out(self, inputs: Sequence[Tensor]) -> None:
        """Raises RuntimeError if the replacement fails for these inputs or writes to them. Its results must match the
        reference's in number, shape, dtype and device, and share no memory with an input."""
        expected = _flat(self.reference(*[x.clone() for x in inputs]))
        given = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
        try:
            results = _flat(self._replaced(*given))
        except Exception as error:  # user code may raise anything
            first_line = str(error).strip().partition("\n")[0]
            raise RuntimeError(f"it raised {type(error).__name__}: {first_line[:200]}") from error
        if len(results) != len(expected):
            raise RuntimeError(f"it returns {len(results)} values, the reference {len(expected)}")
        for result, wanted in zip(results, expected):
            if _kind(result) != _kind(wanted):
                raise RuntimeError(f"it returns {_kind(result)} where the reference returns {_kind(wanted)}")
        memory = {x.untyped_storage().data_ptr() for x in given if x.numel()}
        if any(result.untyped_storage().data_ptr() in memory for result in results):
            raise RuntimeError("a result shares memory with an argument")
        if not all(map(is_same_tensor, inputs, given)):
            raise RuntimeError("it writes to an argument")
        if self.exact and not all(map(is_same_tensor, expected, results)):
            raise RuntimeError("its values are not bit-for-bit equal to the reference's")

    def extra_repr(self) -> str:
        return f"{self.title}({self.arguments})"


def _flat(result: Any) -> list[Any]:
    """Returns a tensor, or a tuple or list of tensors, as a list."""
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _kind(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"{shown(value)} on {value.device}"
