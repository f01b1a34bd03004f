"""One call form: which arguments a region was traced with, and how any later call is brought to that form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_PLAIN = (bool, int, float, str, type(None), torch.Tensor, torch.dtype, torch.device)


class CallForm:
    """The named arguments of one traced call.

    A call matches when, after positional arguments are given their names and arguments that equal their default
    are dropped, the same names remain with the same nesting. So ``model(ids)``, ``model(input_ids=ids)`` and
    ``model(ids, attention_mask=None)`` are one form.
    """

    def __init__(self, forward: Callable, args: tuple, kwargs: dict[str, Any]):
        parameters = inspect.signature(forward).parameters.values()
        kinds = inspect.Parameter
        self.positional = [
            p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
        ]
        self.defaults = {p.name: p.default for p in parameters if p.default is not kinds.empty}
        if any(p.kind is kinds.POSITIONAL_ONLY for p in parameters):
            raise ValueError("forward has positional-only parameters")
        if len(args) > len(self.positional):
            raise ValueError("forward was called with more positional arguments than it names")
        self.names: tuple[str, ...] = ()
        arguments = self._named(args, kwargs)
        self.names = tuple(arguments)
        leaves, self.spec = pytree.tree_flatten(list(arguments.values()))
        self.flat = len(leaves) == len(self.names)

    def leaves(self, args: tuple, kwargs: dict[str, Any]) -> list[Any] | None:
        """The flat argument values of a call in the traced order, or None where the call has another form."""
        if not args and tuple(kwargs) == self.names:
            values = list(kwargs.values())
        elif not kwargs and len(args) == len(self.names) and tuple(self.positional[: len(args)]) == self.names:
            values = list(args)
        elif len(args) > len(self.positional):
            return None
        else:
            named = self._named(args, kwargs)
            if named is None or len(named) != len(self.names) or any(n not in named for n in self.names):
                return None
            values = [named[name] for name in self.names]
        if self.flat and all(isinstance(value, _PLAIN) for value in values):
            return values
        leaves, spec = pytree.tree_flatten(values)
        return leaves if spec == self.spec else None

    def keywords(self, leaves: list[Any]) -> dict[str, Any]:
        """The keyword arguments whose flat values are ``leaves``."""
        return dict(zip(self.names, pytree.tree_unflatten(leaves, self.spec)))

    def _named(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any] | None:
        named = dict(zip(self.positional, args))
        if any(name in named for name in kwargs):
            return None
        named.update(kwargs)
        return {n: v for n, v in named.items() if n in self.names or not self._is_default(n, v)}

    def _is_default(self, name: str, value: Any) -> bool:
        if name not in self.defaults:
            return False
        default = self.defaults[name]
        return value is default or (isinstance(value, (bool, int, float, str)) and value == default)
