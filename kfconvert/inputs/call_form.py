"""Call forms: the arguments of a traced call, and the conversion of later calls to the same form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .caches import CacheKind, UnknownCache, caches_in, is_cache, taken_apart
from .equality import is_equal

# Exact types that are leaves for pytree.
_LEAVES = frozenset((bool, int, float, str, type(None), torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device))
# Maximum number of cached call signatures. With **kwargs, names may come from data.
MAX_SPELLINGS = 100

# The permutation from the values of a call (positional first) to the traced order: the index of each value, and
# (index, default) of values that are dropped if they equal their default.
Order = tuple[list[int], list[tuple[int, Any]]]


class CallForm:
    """The named arguments of one traced call.

    Matching names the positional arguments and drops arguments that equal their default. A call matches if the
    same names remain with the same nesting, and those in ``**kwargs`` in the same order. ``model(ids)``,
    ``model(input_ids=ids)`` and ``model(ids, attention_mask=None)`` have one form.
    """

    def __init__(self, forward: Callable, args: tuple, kwargs: dict[str, Any]):
        parameters = inspect.signature(forward).parameters.values()
        kinds = inspect.Parameter
        self.positional = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        self.defaults = {p.name: p.default for p in parameters if p.default is not kinds.empty}
        if any(p.kind is kinds.POSITIONAL_ONLY for p in parameters):
            raise ValueError("forward has positional-only parameters")
        if len(args) > len(self.positional):
            raise ValueError("forward was called with more positional arguments than named parameters")
        given = dict(zip((*self.positional[: len(args)], *kwargs), (*args, *kwargs.values())))
        arguments = {
            name: value
            for name, value in given.items()
            if name not in self.defaults or not _equals(value, self.defaults[name])
        }
        self.names = tuple(arguments)
        self.parameters = frozenset(p.name for p in parameters if p.kind is not kinds.VAR_KEYWORD)
        try:
            self.form = taken_apart(list(arguments.values()))[1]
        except UnknownCache as error:
            raise ValueError(str(error)) from None
        if len(self.form.caches) > len(caches_in(arguments.values())):
            raise ValueError("a list or dict argument contains a cache")
        self.flat = all(spec.is_leaf() for spec in self.form.spec.children()) and not self.form.caches
        self._orders: dict[tuple, Order | None] = {}

    @property
    def takes_filled_cache(self) -> bool:
        """Whether its leaves include tensors of caches."""
        return any(kind.count for kind in self.form.caches.values() if isinstance(kind, CacheKind))

    def takes(self, count: int, keywords: list[str]) -> bool:
        """Whether a call with ``count`` positional arguments and these keywords can have this form."""
        return self.order(count, keywords) is not None

    def leaves(self, args: tuple, kwargs: dict[str, Any]) -> list[Any] | None:
        """Returns the flat argument values of a call in the traced order; None if the call has another form."""
        spelling = (len(args), *kwargs)
        try:
            order = self._orders[spelling]
        except KeyError:
            if len(self._orders) >= MAX_SPELLINGS:
                self._orders.clear()
            order = self._orders[spelling] = self.order(len(args), list(kwargs))
        if order is None:
            return None
        taken, left_out = order
        values = [*args, *kwargs.values()]
        for index, default in left_out:
            if not _equals(values[index], default):
                return None
        values = [values[index] for index in taken]
        if self.flat and _LEAVES.issuperset(map(type, values)):
            return values
        try:
            leaves, form = taken_apart(values)
        except UnknownCache:
            return None
        return leaves if form == self.form else None

    def passed(self, args: tuple, kwargs: dict[str, Any]) -> list[Any]:
        """Returns the cache arguments of a call with this form, in the traced order."""
        if not self.form.caches:
            return []
        given = dict(zip(self.positional, args)) | kwargs
        return [given[name] for name in self.names if is_cache(given[name])]

    def keywords(self, leaves: list[Any]) -> dict[str, Any]:
        """Returns the keyword arguments with the flat values ``leaves``."""
        return dict(zip(self.names, self.form.put_together(leaves)))

    def lists(self, leaves: list[Any]) -> dict[str, Any]:
        """Returns the keyword arguments like ``keywords``, with lists of flat values instead of caches and of objects
        of classes registered with pytree."""
        return dict(zip(self.names, self.form.as_lists(leaves)))

    def order(self, count: int, keywords: list[str]) -> Order | None:
        """Returns the ``Order`` for calls with ``count`` positional arguments and these keywords; None if such a call
        cannot have this form."""
        if count > len(self.positional):
            return None
        given = self.positional[:count] + keywords
        indices = {name: index for index, name in enumerate(given)}
        others = [name for name in given if name not in self.names]
        # The forward may depend on the order of **kwargs.
        free = [name for name in given if name not in self.parameters]
        if free != [name for name in self.names if name not in self.parameters]:
            return None
        known = indices.keys() >= set(self.names) and self.defaults.keys() >= set(others)
        if len(indices) < len(given) or not known:
            return None
        return [indices[name] for name in self.names], [(indices[name], self.defaults[name]) for name in others]


def _equals(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, (bool, int, float, str)) and is_equal(value, default))
