"""Self-attention between two linear layers. The first computes queries, keys and values in one product."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .base import FusedModule, Plan
from .linear import FusedLinear
from .merged import plain_linear


class FusedSelfAttention(FusedModule):
    """``out_proj(softmax(q k^T / sqrt(D)) v)`` with ``q, k, v = in_proj(x)``, which is ``nn.MultiheadAttention`` of one
    tensor without masks and returned weights; Vaswani et al., arXiv:1706.03762.

    x: (batch, length, features) with ``batch_first``, else (length, batch, features); y: as x. float64, float32,
    float16 or bfloat16, all of one dtype and device. Unlike the original, the module does not copy heads: it reads them
    from the product, and writes their results in the order that the second layer reads.

    ``in_proj``: ``nn.Linear`` to 3 x ``heads`` x D features, queries first; ``out_proj``: ``nn.Linear`` from ``heads``
    x D features. Both may be ``FusedLinear`` without an activation, used unchanged. Raises ValueError for an
    activation, or if their sizes do not match.
    Strategies: as in :class:`FusedLinear`, for both layers.
    """

    live_strategies = FusedLinear.live_strategies

    def __init__(self, in_proj: nn.Module, out_proj: nn.Module, heads: int, batch_first: bool = True):
        super().__init__()
        self.in_proj, self.out_proj = plain_linear(in_proj), plain_linear(out_proj)
        self.heads, self.batch_first = heads, batch_first
        inner = self.out_proj.in_features
        if heads < 1 or inner % heads or self.in_proj.out_features != 3 * inner:
            raise ValueError(
                f"{heads} heads, {self.in_proj.out_features} features of queries, keys and values, and {inner} of "
                "results do not match"
            )

    @classmethod
    def examples(cls):
        for batch_first in (True, False):
            yield cls(nn.Linear(8, 24), nn.Linear(8, 8), 2, batch_first), (torch.randn(3, 6, 8),)

    def strategies(self, x: torch.Tensor) -> list[str]:
        return self.in_proj.strategies(x)

    def differentiable(self, x: torch.Tensor) -> torch.Tensor:
        return self._attended(x, self.in_proj.differentiable, self.out_proj.differentiable)

    def plan(self, x: torch.Tensor) -> Plan:
        strategy = self.choose(x)
        if strategy == "composition":
            return self.reference
        self.in_proj.strategy = self.out_proj.strategy = strategy
        inner = x.new_empty((*x.shape[:-1], self.out_proj.in_features))
        first, second = self.in_proj.plan(x), self.out_proj.plan(inner)
        return lambda x: self._attended(x, first, second)

    def places(self) -> list[tuple[dict, str]]:
        if self.strategy in self.live_strategies:
            return []
        return [place for layer in (self.in_proj, self.out_proj) for place in layer.places()]

    def _attended(self, x: torch.Tensor, first: Callable, second: Callable) -> torch.Tensor:
        # From (batch, length, 3, heads, D), or (length, batch, ...), to (3, batch, heads, length, D).
        order = (2, 0, 3, 1, 4) if self.batch_first else (2, 1, 3, 0, 4)
        features = self.out_proj.in_features
        packed = first(x).unflatten(-1, (3, self.heads, features // self.heads))
        y = F.scaled_dot_product_attention(*packed.permute(order).unbind(0))
        y = y.transpose(1, 2) if self.batch_first else y.permute(2, 0, 1, 3)
        return second(y.reshape(*x.shape[:-1], features))

    def reference(self, x: torch.Tensor) -> torch.Tensor:
        return self._attended(x, self.in_proj.reference, self.out_proj.reference)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, batch_first={self.batch_first}"
