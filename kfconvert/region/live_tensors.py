"""The places in the model of the tensors that the placeholders of a graph represent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ..wrapped_tensors import Path, inner_tensor
from .region import Region

# (dict with a tensor of the model, or a module for its __dict__; key)
Place = tuple[dict[str, Any] | nn.Module, str]


class LiveTensors:
    """The parameters, buffers and constants of a model for the placeholders of its region's graph. For a distributed
    parameter, this is the shard of this rank; for a quantized weight, its data or its scale; for a weight that autocast
    casts, a copy in the other dtype."""

    def __init__(self, model: nn.Module, region: Region):
        self.model, self._region = model, region
        self._inner: dict[str, Any] = {}
        self._casted: dict[str, Tensor] = {}
        for name, path in region.inner.items():
            self._inner[name] = inner_tensor(_held(*self._place(name)), path)

    def store(self, node: fx.Node) -> Place:
        """Returns the holder (dict of parameters or buffers, or the module of a plain attribute) and key of the tensor.
        A dict of inner tensors must be updated by its reader with ``inner``, and one of casted weights with
        ``casts``."""
        if node.name in self._region.constants:
            return self._region.constants, node.name
        if node.name in self._inner:
            return self._inner, node.name
        if node.name in self._region.casted:
            return self._casted, node.name
        return self._place(node.name)

    def origin(self, node: fx.Node) -> tuple[int, str]:
        """Returns a value that is equal for placeholders of the same place in the model, in any region of it."""
        if node.name in self._region.constants:
            return id(self.tensor(node)), ""
        holder, key = self._place(node.name)
        region = self._region
        return id(holder), f"{key} {region.inner.get(node.name, '')} {region.casted.get(node.name, '')}"

    def is_inner(self, node: fx.Node) -> bool:
        """Whether the tensor is inside of the model's tensor."""
        return node.name in self._inner

    def inner(self) -> list[tuple[Place, Place, Path]]:
        """Returns for each inner tensor the place of its wrapper in the model, its place in ``store``, and its path in
        the wrapper."""
        return [(self._place(name), (self._inner, name), path) for name, path in self._region.inner.items()]

    def casts(self) -> list[tuple[Place, Place, torch.dtype]]:
        """Returns for each casted weight its place in the model, the place of the copy in ``store``, and the dtype."""
        casted = self._region.casted
        return [(self._place(name), (self._casted, name), dtype) for name, dtype in casted.items()]

    def _place(self, placeholder: str) -> Place:
        path, name = self._region.slots[placeholder]
        owner = self.model.get_submodule(path)
        return next((store for store in (owner._parameters, owner._buffers) if name in store), owner), name

    def copies(self) -> list[Tensor]:
        """Returns the present copies of casted weights."""
        return [*self._casted.values()]

    def tensor(self, node: fx.Node) -> Tensor:
        if node.name in self._region.casted and node.name not in self._casted:
            self._casted[node.name] = _held(*self._place(node.name)).detach().to(self._region.casted[node.name])
        return _held(*self.store(node))

    def arguments(self, leaves: list[Any]) -> list[Any]:
        """Returns the values of all placeholders of the graph, in order: these tensors, and the flat inputs
        ``leaves``."""
        users = iter(leaves)
        placeholders = self._region.graph.find_nodes(op="placeholder")
        return [next(users) if node.name in self._region.inputs else self.tensor(node) for node in placeholders]


def _held(holder: Any, name: str) -> Any:
    return vars(holder)[name] if isinstance(holder, nn.Module) else holder[name]
