"""Test cases of the pattern ``attention``: its spellings and near misses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..matching import Case
from .cases import TOKENS, Inputs, net

_LOWEST = torch.finfo(torch.float32).min


def _inputs(*leading: int, masked: bool = False) -> Inputs:
    def make() -> tuple[Tensor, ...]:
        shape = (2, *leading)
        tensors = (torch.randn(*shape, 5, 8), torch.randn(*shape, 7, 8), torch.randn(*shape, 7, 8))
        hidden = torch.zeros(2, 1, 5, 7, dtype=torch.bool)
        hidden[0, :, 2:, 3:] = True
        return (*tensors, hidden) if masked else tensors

    return make


def _weights(scores: Tensor) -> Tensor:
    return torch.softmax(scores, -1)


def _dots(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2)


def _additive(mask: Tensor, fill: float = _LOWEST) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, fill)


_FOUR, _THREE, _MASK = _inputs(3), _inputs(), _inputs(3, masked=True)


def _found(function: Callable[..., Any], inputs: Inputs = _FOUR, *expected: Any) -> Case:
    return Case(net(lambda self, q, k, v: function(q, k, v)), inputs, *expected)


def _masked(function: Callable[..., Tensor], count: int = 1, reason: str | None = None, inputs: Inputs = _MASK) -> Case:
    return Case(net(lambda self, q, k, v, mask: function(q, k, v, mask)), inputs, count, reason)


def _refused(function: Callable[..., Any], reason: str) -> Case:
    return _found(function, _FOUR, 0, reason)


def _float_mask(change: Callable[[Tensor], Tensor], width: int = 7) -> Case:
    """A mask argument, which may be -inf in whole rows."""

    def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return _weights(_dots(q, k) + change(mask)) @ v

    def inputs() -> tuple[Tensor, ...]:
        mask = torch.randn(5, width)
        mask[1:3, 2:] = -torch.inf
        return (*_FOUR(), mask)

    return _masked(function, inputs=inputs)


def _buffer_mask(function: Callable[..., Tensor], mask: Tensor, count: int = 1, reason: str | None = None) -> Case:
    made = net(lambda self, q, k, v: function(q, k, v, self.mask), mask=lambda: nn.Buffer(mask.clone()))
    return Case(made, _FOUR, count, reason)


def _unused(self: Any, x: Tensor) -> Tensor:
    return self.attention(x, x, x, need_weights=True)[0]


def _einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = torch.einsum("bnhd,bmhd->bhnm", q, k) * 0.3
    return torch.einsum("bhnm,bmhe->bnhe", _weights(scores), v)


def _baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = torch.arange(7.0).expand(2, 1, 7)
    return torch.bmm(_weights(torch.baddbmm(bias, q, k.transpose(1, 2), alpha=0.3)), v)


def _written_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of zeros, with one row set to -inf through a view."""
    mask = torch.zeros(5, 7)
    mask[1, 3:] = -torch.inf
    mask[3] = -torch.inf
    return _weights(_dots(q, k) + mask.clone()) @ v


def _weights_returned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = _weights(_dots(q, k))
    return weights @ v, weights


def _without_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries, keys and values with a batch of 1, expanded by the mask."""
    return _weights(_dots(q[:1], k[:1]) + torch.arange(2.0)[:, None, None, None]) @ v[:1]


# Python code may write to a tensor that it references at any time.
_HELD = torch.tensor(_LOWEST)

CASES: tuple[Case, ...] = (
    _found(lambda q, k, v: _weights(_dots(q, k)) @ v),
    _found(lambda q, k, v: _weights(_dots(q, k) * 0.3) @ v),
    _found(lambda q, k, v: _weights(_dots(q, k) / 2.8) @ v, _THREE),
    _found(lambda q, k, v: _weights(_dots(q * 0.3, k)) @ v),
    _found(lambda q, k, v: _weights(_dots(q, k * 0.3)) @ v),
    _found(lambda q, k, v: _weights(q @ (k.transpose(-2, -1) / 2.8)) @ v),
    _found(lambda q, k, v: _weights(_dots(q * 0.5, k / 1.4)) @ v),
    _found(lambda q, k, v: _weights(_dots(q, k) / torch.tensor(2.8)) @ v),
    _found(lambda q, k, v: _weights(_dots(q, k) / torch.sqrt(torch.tensor(k.shape[-1]))) @ v),
    _found(lambda q, k, v: _weights(torch.full([], 0.3) * _dots(q, k)) @ v),
    _found(lambda q, k, v: _weights(torch.matmul(q, k.permute(0, 1, 3, 2)) * 0.3) @ v),
    _found(lambda q, k, v: torch.bmm(_weights(torch.bmm(q, k.transpose(1, 2))), v), _THREE),
    _found(lambda q, k, v: F.dropout(F.softmax(_dots(q, k), -1, dtype=torch.float32), 0.5, False).to(v.dtype) @ v),
    _found(lambda q, k, v: _weights(_dots(q, k).double()).to(v.dtype) @ v),
    _found(lambda q, k, v: _weights(_dots(q, k)) @ v[:, :1]),
    _found(lambda q, k, v: _weights(_dots(q, k[:, :1])) @ v),
    _found(_einsum),
    _found(lambda q, k, v: _weights(torch.einsum("gbhnd,gbhmd->gbhnm", q, k * 0.3)) @ v, _inputs(3, 4)),
    _found(lambda q, k, v: _weights(_dots(q, k) + torch.ones(3, 1, 5, 7)) @ v[:, :1], _inputs(3, 4)),
    _found(_baddbmm, _THREE),
    _masked(lambda q, k, v, hidden: _weights(_dots(q, k) * 0.3 + _additive(hidden)) @ v),
    _masked(lambda q, k, v, hidden: _weights(_additive(hidden) + _dots(q * 0.3, k)) @ v),
    _masked(lambda q, k, v, hidden: _weights((_dots(q, k) * 0.3).masked_fill(hidden, _LOWEST)) @ v),
    _masked(lambda q, k, v, hidden: _weights(torch.where(hidden, -1e9, _dots(q, k))) @ v),
    _masked(lambda q, k, v, hidden: _weights(torch.where(hidden, torch.tensor(_LOWEST), _dots(q, k))) @ v),
    _masked(lambda q, k, v, hidden: _weights(torch.where(~hidden, _dots(q, k), _LOWEST)) @ v),
    _masked(lambda q, k, v, hidden: _weights(_dots(q, k) + (1.0 - (~hidden).float()) * _LOWEST) @ v),
    _masked(lambda q, k, v, hidden: _weights(_dots(q, k).masked_fill(hidden, -torch.inf)) @ v),
    _masked(lambda q, k, v, hidden: _weights(_dots(q, k) + _additive(hidden, -torch.inf)) @ v),
    _masked(lambda q, k, v, hidden: _weights(_dots(q, k) + _additive(hidden) + _additive(hidden[:1])) @ v),
    _masked(lambda q, k, v, hidden: _weights(_dots(q, k).masked_fill(hidden, _LOWEST) + _additive(hidden)) @ v),
    _float_mask(lambda mask: mask),
    _float_mask(lambda mask: F.pad(mask, (1, 0)), width=6),
    _float_mask(lambda mask: torch.split(mask, 7, -1)[0]),
    _buffer_mask(lambda q, k, v, m: _weights(_dots(q, k) + m) @ v, torch.linspace(-1, 1, 105).reshape(1, 3, 5, 7)),
    _buffer_mask(lambda q, k, v, m: _weights(_dots(q, k) + m) @ v, torch.full((5, 7), -torch.inf).triu(1)),
    _buffer_mask(lambda q, k, v, m: _weights(_dots(q, k) * m) @ v, torch.tensor(0.3)),
    _buffer_mask(lambda q, k, v, m: _weights(m * _dots(q, k) + m) @ v, torch.linspace(-1, 1, 3)[:, None, None]),
    _found(_written_mask),
    Case(net(_unused, attention=lambda: nn.MultiheadAttention(16, 4, batch_first=True)), TOKENS),
    _masked(lambda q, k, v, hidden: _weights(_dots(q, k).masked_fill(hidden, -100.0)) @ v, 0, "scores with -100.0"),
    _masked(lambda q, k, v, hidden: _weights(torch.where(hidden, _HELD, _dots(q, k))) @ v, 0, "scores with a tensor"),
    _masked(
        lambda q, k, v, hidden: _weights(_dots(q, k).masked_fill(hidden, -1e9) + _additive(hidden[:1])) @ v,
        0,
        "a mask is added after scores are filled with -1000000000.0",
    ),
    _masked(
        lambda q, k, v, hidden: _weights((_dots(q, k) + _additive(hidden[:1])).masked_fill(hidden, _LOWEST)) @ v,
        0,
        "a mask is added before",
    ),
    _masked(lambda q, k, v, hidden: _weights(_dots(q, k) + hidden) @ v, 0, "a mask of dtype torch.bool"),
    _masked(lambda q, k, v, hidden: (_weights(_dots(q, k)) * hidden) @ v, 0, "its value goes to aten.mul.Tensor"),
    _masked(lambda q, k, v, hidden: _weights(_dots(q, k) * ~hidden) @ v, 0, "with a fixed scale"),
    _buffer_mask(
        lambda q, k, v, m: _weights(_dots(q, k) * m) @ v, torch.linspace(0, 1, 5)[:, None], 0, "a fixed scale"
    ),
    _refused(_weights_returned, "aten.softmax.int is also used by the model's output"),
    _refused(lambda q, k, v: F.dropout(_weights(_dots(q, k)), 0.5, True) @ v, "its value goes to aten.dropout"),
    _refused(lambda q, k, v: torch.softmax(_dots(q, k), -2) @ v, "not over the keys"),
    _refused(lambda q, k, v: _weights(_dots(q, k).half()).float() @ v, "the softmax is taken in torch.float16"),
    _refused(lambda q, k, v: _weights(_dots(q, k) * -0.3) @ v, "the scale is -0.3"),
    _refused(lambda q, k, v: _weights(_dots(q, k) + 1.0) @ v, "a constant is added"),
    _refused(lambda q, k, v: _weights(_dots(q[:, :1], k)) @ v, "broadcast over the keys"),
    _refused(_without_heads, "the masks or values have a larger batch"),
    _refused(lambda q, k, v: _weights(_dots(q[:1], k[:1])) @ v, "the masks or values have a larger batch"),
)
