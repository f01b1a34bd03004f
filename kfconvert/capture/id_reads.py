"""What a model does with token ids: whether anything but their number and their embeddings can reach its outputs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

# What is computed by these tells how many ids there are, and nothing of them.
_OF_SHAPES = {
    Tensor.dim, Tensor.new_ones, Tensor.new_zeros, Tensor.numel, Tensor.size, torch.ones_like, torch.zeros_like,
}  # fmt: skip
_SAME_IDS = {
    Tensor.__getitem__, Tensor.contiguous, Tensor.long, Tensor.reshape, Tensor.to, Tensor.unsqueeze, Tensor.view,
}  # fmt: skip
_LOOKUPS = {nn.functional.embedding, torch.embedding}
# transformers looks for padding here, only to warn about it.
_WARNING = "warn_if_padding_and_no_attention_mask"


@torch.no_grad()
def only_looked_up(model: nn.Module, name: str, arguments: dict[str, Any]) -> bool:
    """Whether ``model``, called with ``arguments``, looks up the ids ``name`` in embeddings, and does nothing else with
    them but ask for their number."""
    ids = arguments[name].clone()
    with _Readers(ids) as readers:
        try:
            model(**{**arguments, name: ids})
        except Exception:  # whatever the model raises, nothing is known of it
            return False
    return readers.only_lookups


class _Readers(TorchFunctionMode):
    """Follows ids through the functions that are called with them."""

    def __init__(self, ids: Tensor):
        super().__init__()
        self.only_lookups = True
        self._ids = {id(ids): ids}  # kept alive, so that no other tensor takes its place

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if any(id(value) in self._ids for value in pytree.tree_leaves((args, kwargs))):
            is_property = getattr(func, "__name__", "") == "__get__"
            if func in _SAME_IDS or (is_property and isinstance(result, Tensor)):
                self.only_lookups &= not result.is_floating_point()
                self._ids[id(result)] = result
            elif not (is_property or func in _OF_SHAPES or func in _LOOKUPS or _is_warning()):
                self.only_lookups = False
        return result


def _is_warning() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != _WARNING:
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").startswith("transformers.")
