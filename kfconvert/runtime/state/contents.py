"""The contents of lists, dicts, sets, tensors and unregistered modules as entries of a Watch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import is_equal
from .derived import Derived
from .fingerprint import fingerprints, may_fetch
from .references import OF_CONVERSION, OF_EVERY_MODULE, is_config_dict, items, settings_of
from .watch import ITEMS, TYPE, Entry

CHANGED = "was changed after the conversion; convert it again"
# An entry, and the reason for which a change of it matters.
Found = tuple[Entry, str]

# The maximum depth of watched nested containers.
_DEPTH = 4


class _Numbers:
    """The elements of a tensor at construction, compared where a detectable write has occurred, or ``closely``."""

    def __init__(self, tensor: Tensor):
        self._kind = tensor.shape, tensor.dtype
        self._fingerprint = fingerprints([tensor])
        # Tensors of other layouts have no address: they are compared in each call.
        self._compared = Derived() if tensor.layout is torch.strided else None

    def are_in(self, tensor: Tensor, closely: bool) -> bool:
        compared = {} if self._compared is None else self._compared.values([tensor])
        if not compared or closely:
            same = (tensor.shape, tensor.dtype) == self._kind and fingerprints([tensor]) == self._fingerprint
            compared["same"] = same
        return compared["same"]


def first_different(compared: list[tuple[str, Any, Any]], closely: bool = False) -> str | None:
    """The reason for the first set or tensor whose content has changed, None where there is none.

    Args:
        closely: also compare tensors without a detectable write.
    """
    for name, value, known in compared:
        if not (known.are_in(value, closely) if type(known) is _Numbers else is_equal(frozenset(value), known)):
            return _reason(name)
    return None


def _reason(name: str) -> str:
    return f"the content of {name} {CHANGED}"


def is_alike(value: Any, other: Any, depth: int = 0) -> bool:
    """Whether both are equal values, tensors with equal elements, or dicts of such, as tables that ``eval()`` cleared
    and a call filled again."""
    if is_equal(value, other):
        return True
    if type(value) is not type(other) or depth > _DEPTH:
        return False
    if type(value) is Tensor:
        kinds = [(each.shape, each.stride(), each.dtype, each.device, each.requires_grad) for each in (value, other)]
        return kinds[0] == kinds[1] and may_fetch() and torch.equal(value, other)
    if type(value) is dict or is_config_dict(value):
        ours, theirs = settings_of(value), settings_of(other)
        return list(ours) == list(theirs) and all(is_alike(ours[key], theirs[key], depth + 1) for key in ours)
    return False


class Contents:
    """Collects the entries for the contents of containers, each container once, to a depth of ``_DEPTH``.

    ``compared`` has the previous contents of tensors and sets, which a Watch does not cover.

    Args:
        model: its modules have entries elsewhere.
    """

    def __init__(self, model: nn.Module):
        self._seen: dict[int, Any] = {id(module): module for module in model.modules()}
        self.compared: list[tuple[str, Any, Any]] = []

    def of(self, name: str, value: Any, depth: int = 0) -> Iterator[Found]:
        """Return entries for the contents of ``value``, called ``name``, if it is a mutable container."""
        if id(value) in self._seen or depth > _DEPTH:
            return
        if not isinstance(value, (nn.Module, Tensor, list, tuple, dict, set)):
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            yield from self._of_module(name, value, depth)
        elif isinstance(value, Tensor):
            if not value.is_meta:
                self.compared.append((name, value, _Numbers(value)))
        elif isinstance(value, set):
            self.compared.append((name, value, frozenset(value)))
        elif is_config_dict(value):
            for key, held in settings_of(value).items():
                yield (value, key, held), _reason(name)
                yield from self.of(f"{name}.{key}", held, depth + 1)
        else:
            if isinstance(value, list):
                yield (value, ITEMS, tuple(value)), _reason(name)
            elif isinstance(value, dict):
                yield from self._of_dict(name, value)
            for item in items(value):
                yield from self.of(name, item, depth + 1)

    def _of_dict(self, name: str, value: dict[Any, Any]) -> Iterator[Found]:
        yield (value, ITEMS, tuple(dict.__iter__(value))), _reason(name)
        for key, item in list(dict.items(value)):
            yield (value, key, item), _reason(name)

    def _of_module(self, name: str, module: nn.Module, depth: int) -> Iterator[Found]:
        reason = _reason(name)
        for inner in module.modules():
            if inner is not module and id(inner) in self._seen:
                continue
            self._seen[id(inner)] = inner
            yield (inner, TYPE, type(inner)), reason
            for key, held in list(vars(inner).items()):
                if key in OF_CONVERSION:
                    continue
                yield (inner, key, held), reason
                if key not in OF_EVERY_MODULE and not isinstance(held, Tensor):
                    yield from self.of(f"{name}.{key}", held, depth + 1)
                elif isinstance(held, dict):  # parameters, buffers, submodules and hooks
                    yield from self._of_dict(name, held)
