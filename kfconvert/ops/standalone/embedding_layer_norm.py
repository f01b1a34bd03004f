"""embedding_layer_norm: ``layer_norm(word[ids] + position[n] + token_type[type ids])``, the input of BERT.

One kernel gathers, adds and normalizes. If a gradient is needed, ``F.embedding`` gathers, and
:func:`kfconvert.ops.layer_norm_act` adds and normalizes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...torch_state import being_traced, transformed
from ..declaration import declare, wants_gradients
from ..fused.layer_norm_act import layer_norm_act
from ..registration import (
    define,
    has_kernels,
    require,
    require_float,
    require_same_device,
    require_shape,
    wants_gradient,
)

__all__ = ["embedding_layer_norm"]


def _ids(t):
    return torch.arange(10, device=t().device).view(2, 5)


def _is_not_inference(*args, **kwargs):
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "the kernel does not support autocast"
    return wants_gradients(*args, **kwargs)


@declare(
    group="block",
    example=lambda t, rows, columns: (_ids(t), t(11, columns), t(7, columns), t(2, columns), t(columns), t(columns)),
    why_aten=_is_not_inference,
)
def embedding_layer_norm(
    ids: Tensor,
    word: Tensor,
    position: Tensor,
    token_type: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-12,
    token_type_ids: Tensor | None = None,
) -> Tensor:
    """Computes ``layer_norm(word[ids] + position[n] + token_type[token_type_ids])``, (..., N, D), in word's dtype.

    Half types are added and normalized in float32. If a gradient is needed or autocast is on, the tables are
    added in their dtype, as in plain PyTorch, and autocast's rule of layer norms applies.

    Args:
        ids: (..., N) of int32 or int64, rows of ``word``. An index out of range is an IndexError on the CPU (a
            RuntimeError in a compiled graph) and a device-side assertion on CUDA.
        word: (V, D), float64, float32, float16 or bfloat16; position: (P, D), P at least N, whose row n is
            added at position n; token_type: (T, D).
        weight, bias: (D,) or None, of the norm; word's dtype, or both float32 for a half type.
        eps: added to the variance.
        token_type_ids: as ids, rows of ``token_type``; None is 0 everywhere.

    Raises:
        RuntimeError: incompatible shapes, dtypes or devices.
    """
    _check(ids, word, position, token_type, token_type_ids, weight, bias)
    # If Python can read the values.
    if word.is_cpu and type(ids) is Tensor and not (being_traced() or transformed()):
        _check_ids("ids", ids, "word", word)
        if token_type_ids is not None:
            _check_ids("token_type_ids", token_type_ids, "token_type", token_type)
    eps = float(eps)
    composed = wants_gradient(word, position, token_type, weight)
    composed = composed or (bias is not None and wants_gradient(bias))
    composed = composed or not has_kernels(word) or torch.is_autocast_enabled(word.device.type)
    operator = _compose if composed else _OPERATOR
    return operator(ids, word, position, token_type, token_type_ids, weight, bias, eps)


def _check(ids, word, position, token_type, token_type_ids, weight, bias):
    operator = "embedding_layer_norm"
    for name, tensor in (("ids", ids), ("token_type_ids", token_type_ids)):
        if tensor is not None:
            require_same_device(operator, name, word, tensor, "word")
            require(tensor.dtype in (torch.int32, torch.int64), operator, f"{name} must be int32 or int64")
            require(tensor.dim() >= 1, operator, f"{name} has no dimension")
            require_shape(operator, name, tensor, ids.shape)
    require_float(operator, word)
    require(word.dim() == 2, operator, f"word has shape {tuple(word.shape)}, expected (V, D)")
    for name, tensor, rows in (("position", position, ids.shape[-1]), ("token_type", token_type, 1)):
        require_same_device(operator, name, word, tensor, "word")
        require(tensor.dtype == word.dtype, operator, f"{name} has another dtype than word")
        require(
            tensor.dim() == 2 and tensor.shape[1] == word.shape[1] and tensor.shape[0] >= rows,
            operator,
            lambda: f"{name} has shape {tuple(tensor.shape)}, expected {rows} or more rows of {word.shape[1]}",
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            require_same_device(operator, name, word, tensor, "word")
            require_shape(operator, name, tensor, word.shape[1:])
            fits = tensor.dtype == word.dtype or (word.element_size() == 2 and tensor.dtype == torch.float32)
            fits = fits or torch.is_autocast_enabled(word.device.type)
            require(fits, operator, f"{name} has another dtype than word")


def _check_ids(name, ids, table_name, table):
    """Makes the checks of the compiled kernel's host code."""
    least, most = (int(n) for n in ids.aminmax()) if ids.numel() else (0, 0)
    if least < 0 or (ids.numel() and most >= table.shape[0]):
        raise IndexError(
            f"kfconvert::embedding_layer_norm: {name} holds {least} to {most}, {table_name} has {table.shape[0]} rows"
        )


def _compose(ids, word, position, token_type, token_type_ids, weight, bias, eps):
    x, added = F.embedding(ids, word), position[: ids.shape[-1]]
    if token_type_ids is None:
        added = added + token_type[0]
    else:
        x = x + F.embedding(token_type_ids, token_type)
    return layer_norm_act(x, word.shape[1], weight, bias, eps, residual=added)


def _fake(ids, word, position, token_type, token_type_ids, weight, bias, eps):
    _check(ids, word, position, token_type, token_type_ids, weight, bias)
    return word.new_empty(*ids.shape, word.shape[1])


_OPERATOR = define(
    "embedding_layer_norm(Tensor ids, Tensor word, Tensor position, Tensor token_type, "
    "Tensor? token_type_ids, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    _compose,
    _fake,
)
