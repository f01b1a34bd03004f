"""Where the tensors behind the placeholders of a graph live in the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from .region import Region

# (dict that holds a tensor of the model, or module for its __dict__; key in it)
Place = tuple[dict[str, Any] | nn.Module, str]


class LiveTensors:
    """The parameters, buffers and constants of a model behind the placeholders of its region's graph."""

    def __init__(self, model: nn.Module, region: Region):
        self.model, self._region = model, region

    def store(self, node: fx.Node) -> Place:
        """The holder (dict of parameters or buffers, or the module of a plain attribute) and key of the tensor."""
        if node.name in self._region.constants:
            return self._region.constants, node.name
        path, name = self._region.slots[node.name]
        owner = self.model.get_submodule(path)
        return next((store for store in (owner._parameters, owner._buffers) if name in store), owner), name

    def tensor(self, node: fx.Node) -> Tensor:
        holder, name = self.store(node)
        return vars(holder)[name] if isinstance(holder, nn.Module) else holder[name]
