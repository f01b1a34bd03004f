"""Restores a model that is converted in place if the conversion fails or is interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ..runtime import separate, uninstall


class AsGiven:
    """The modes of a model's modules and, if it is cast or moved, the values of its parameters and buffers.

    Args:
        tensors: whether to keep the tensors, in their current memory.
    """

    def __init__(self, model: nn.Module, tensors: bool):
        self._model = model
        self._modes = [(module, module.training) for module in model.modules()]
        given: list[torch.Tensor] = list(model.parameters()) if tensors else []
        given += [each.grad for each in given if each.grad is not None]
        self._data = [(tensor, tensor.data) for tensor in given]
        modules = list(model.modules()) if tensors else []
        self._buffers = [(each, name, buffer) for each in modules for name, buffer in each._buffers.items()]

    def put_back(self) -> None:
        """Restore the model's original forwards, memory and modes."""
        uninstall(self._model)
        separate(self._model.parameters())
        with torch.inference_mode(False), torch.no_grad():
            for tensor, data in self._data:
                tensor.data = data
            for module, name, buffer in self._buffers:
                module._buffers[name] = buffer
        for module, training in self._modes:
            module.training = training


@contextmanager
def given_back_on_error(given: AsGiven | None) -> Iterator[None]:
    """Context manager that restores a model from ``given``, if any, when the block raises or is interrupted."""
    try:
        yield
    except BaseException:
        if given is not None:
            given.put_back()
        raise
