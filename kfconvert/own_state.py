"""What a model's forward writes to its own buffers and attributes in the calls that a conversion makes, put back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .contents import OF_EVERY_MODULE, plain_objects
from .outputs import is_same_tensor
from .watch import is_equal

_NOT_OWN = OF_EVERY_MODULE | {"forward", "kfconvert_info", "kfconvert_refresh"}


class _Snapshot:
    """Buffers and plain attributes of a model: the values of tensors, and what lists, dicts, sets and plain objects
    among the attributes hold. By the ids of what is kept here as well."""

    def __init__(self, model: nn.Module):
        self.holders: dict[int, tuple[Any, Any]] = {}
        self.tensors: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            self._keep(module._buffers)
            self._keep(vars(module))
        for item in plain_objects([value for module in model.modules() for value in _own(vars(module)).values()]):
            self._keep(vars(item))

    def _keep(self, holder: Any) -> None:
        if id(holder) in self.holders:
            return
        items = _own(holder) if isinstance(holder, dict) else holder.copy()
        self.holders[id(holder)] = holder, items
        for value in items.values() if isinstance(items, dict) else items:
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta:
                self.tensors[id(value)] = value, value.detach().clone()
            elif isinstance(value, (list, dict, set)):
                self._keep(value)


class OwnState:
    """The state that ``model`` keeps for itself, besides its parameters, as it was when this was made.

    Some models learn a size, or make a part of themselves, in their first call; ``settled`` is told after that. What
    changes again, in later calls, is counted, averaged or cached from call to call: only that is put back. ``written``
    has the names of the attributes among it.
    """

    def __init__(self, model: nn.Module):
        self._before = self._after = _Snapshot(model)
        self.written: set[str] = set()

    def settled(self, model: nn.Module) -> None:
        self._after = _Snapshot(model)

    @torch.no_grad()
    def restore(self) -> None:
        """Put back what has changed since the first call, to what it was before; what came with that call, and may be
        read by a graph, to what it was then. What was added later is left: caches are filled so."""
        for key, (holder, after) in self._after.holders.items():
            _, before = self._before.holders.get(key, (holder, after))
            if isinstance(holder, dict):
                for name, value in (after | before).items():
                    if not is_equal(holder.get(name), after.get(name)):
                        holder[name] = value
                        self.written.add(str(name))
            elif isinstance(holder, list) and not _same(holder, after):
                holder[:] = before
            elif isinstance(holder, set) and holder != after:
                holder.clear()
                holder |= before
        for key, (tensor, after) in self._after.tensors.items():
            _, before = self._before.tensors.get(key, (tensor, after))
            if not is_same_tensor(tensor, after) and tensor.shape == before.shape:
                tensor.copy_(before)



def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in _NOT_OWN}


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other))
