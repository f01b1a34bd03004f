"""Tensors that wrap other tensors: distributed parameters, and quantized weights such as those of torchao.

Their classes have ``__tensor_flatten__``. A graph computes with the inner tensors, which are plain.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

# The attributes that lead from a tensor to an inner tensor.
Path = tuple[str, ...]


def inner_tensor(tensor: Any, path: Path) -> Any:
    """Returns the inner tensor of ``tensor`` at ``path``. Raises AttributeError if there is none."""
    for name in path:
        if name not in tensor.__tensor_flatten__()[0]:
            raise AttributeError(f"a {type(tensor).__name__} has no inner tensor {name!r}")
        tensor = getattr(tensor, name)
    return tensor


def wrapping(tensor: Any) -> Any:
    """Returns what a computation with a wrapper depends on besides the inner tensors: its class, its metadata, and the
    same for its inner tensors. None for a plain tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return None
    names, metadata = tensor.__tensor_flatten__()
    return type(tensor), tensor.shape, metadata, {name: wrapping(getattr(tensor, name)) for name in names}


def is_dequantizable(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a wrapper whose class computes its values by ``dequantize()``."""
    return is_traceable_wrapper_subclass(tensor) and type(tensor).dequantize is not Tensor.dequantize
