"""One call form: which arguments a region was traced with, and how any later call is brought to that form."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from .caches import CacheKind, UnknownCache, caches_in, is_cache, taken_apart
from .equality import is_equal

# Values of these very types are leaves for pytree, without asking it.
_LEAVES = frozenset((bool, int, float, str, type(None), torch.Tensor, torch.nn.Parameter, torch.dtype, torch.device))
# So many ways to spell a call are remembered; where forward takes any keyword, names may come from data.
MAX_SPELLINGS = 100

# How to bring the values of a call, positional ones first, to the traced order: the index of each, and (index, default)
# of those that are left out where they equal their default.
Order = tuple[list[int], list[tuple[int, Any]]]


class CallForm:
    """The named arguments of one traced call.

    A call matches when, after positional arguments are given their names and arguments that equal their default
    are dropped, the same names remain with the same nesting, those in ``**kwargs`` in the same order. So
    ``model(ids)``, ``model(input_ids=ids)`` and ``model(ids, attention_mask=None)`` are one form.
    """

    def __init__(self, forward: Callable, args: tuple, kwargs: dict[str, Any]):
        parameters = inspect.signature(forward).parameters.values()
        kinds = inspect.Parameter
        self.positional = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        self.defaults = {p.name: p.default for p in parameters if p.default is not kinds.empty}
        if any(p.kind is kinds.POSITIONAL_ONLY for p in parameters):
            raise ValueError("forward has positional-only parameters")
        if len(args) > len(self.positional):
            raise ValueError("forward was called with more positional arguments than it names")
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
            raise ValueError("a cache lies within a list or dict among its arguments")
        self.flat = all(spec.is_leaf() for spec in self.form.spec.children()) and not self.form.caches
        self._orders: dict[tuple, Order | None] = {}

    @property
    def takes_filled_cache(self) -> bool:
        """Whether tensors of caches are among its leaves."""
        return any(kind.count for kind in self.form.caches.values() if isinstance(kind, CacheKind))

    def takes(self, count: int, keywords: list[str]) -> bool:
        """Whether a call with ``count`` positional arguments and these keywords can have this form."""
        return self.order(count, keywords) is not None

    def leaves(self, args: tuple, kwargs: dict[str, Any]) -> list[Any] | None:
        """The flat argument values of a call in the traced order, or None where the call has another form."""
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
        """The caches among the arguments of a call that has this form, in the traced order."""
        if not self.form.caches:
            return []
        given = dict(zip(self.positional, args)) | kwargs
        return [given[name] for name in self.names if is_cache(given[name])]

    def keywords(self, leaves: list[Any]) -> dict[str, Any]:
        """The keyword arguments whose flat values are ``leaves``."""
        return dict(zip(self.names, self.form.put_together(leaves)))

    def lists(self, leaves: list[Any]) -> dict[str, Any]:
        """As ``keywords``, with the list of its flat values in the place of each cache, and of each object of a class
        for which pytree has to be told how to take it apart."""
        return dict(zip(self.names, self.form.as_lists(leaves)))

    def order(self, count: int, keywords: list[str]) -> Order | None:
        """The ``Order`` for calls with ``count`` positional arguments and these keywords; None where such a call cannot
        have this form."""
        if count > len(self.positional):
            return None
        given = self.positional[:count] + keywords
        indices = {name: index for index, name in enumerate(given)}
        others = [name for name in given if name not in self.names]
        # What goes into **kwargs may be used in the order in which it is given.
        free = [name for name in given if name not in self.parameters]
        if free != [name for name in self.names if name not in self.parameters]:
            return None
        known = indices.keys() >= set(self.names) and self.defaults.keys() >= set(others)
        if len(indices) < len(given) or not known:
            return None
        return [indices[name] for name in self.names], [(indices[name], self.defaults[name]) for name in others]


def _equals(value: Any, default: Any) -> bool:
    return value is default or (isinstance(value, (bool, int, float, str)) and is_equal(value, default))
