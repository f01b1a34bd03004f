"""Modules of one structure share a graph: never where they compute something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kfconvert import ModelConverter


class Block(nn.Module):
    """A residual layer with an attribute that numbers it, as the blocks of transformers have."""

    def __init__(self, index: int, width: int = 8):
        super().__init__()
        self.index = index
        self.inner, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm(x + torch.relu(self.inner(x)))
        return x if mask is None else x.masked_fill(mask, 0.0)


class Tokens(nn.Module):
    """A token model, whose batch and sequence are free: ``step`` calls its blocks."""

    def __init__(self, kind: type[nn.Module], step: Callable[[int, nn.Module, Tensor], Tensor]):
        super().__init__()
        self.embedding, self.step = nn.Embedding(20, 8), step
        self.blocks = nn.ModuleList(kind(index) for index in range(3))

    def forward(self, input_ids: Tensor) -> Tensor:
        batch, length = input_ids.shape
        x = self.embedding(input_ids) + torch.zeros(batch, length, 8)
        for index, block in enumerate(self.blocks):
            x = self.step(index, block, x)
        return x


class Causal(Block):
    def __init__(self, index: int):
        super().__init__(index)
        self.causal = False

    def forward(self, x: Tensor) -> Tensor:
        q = super().forward(x)[:, None]
        return x + nn.functional.scaled_dot_product_attention(q, q, q, is_causal=self.causal)[:, 0]


def toggled(index: int, block: nn.Module, x: Tensor) -> Tensor:
    block.causal = True
    first = block(x)
    block.causal = False
    return first + block(x)


class Rolling(Block):
    def forward(self, x: Tensor, amount: Tensor | None = None) -> Tensor:
        return super().forward(x).roll(int(amount), 1)


class Asking(Block):
    """Looks at the kind of an integer, which nothing can tell from a look at another object."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.roll(self.index + 1, 1) if isinstance(self.index, int) else y


class Stopping(Tokens):
    """Cannot be captured as a whole."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = super().forward(input_ids)
        return x if x.sum() > 1e9 else x * 2


@pytest.mark.parametrize(
    ("kind", "step", "model"),
    [
        (Causal, toggled, Tokens),
        (Rolling, lambda index, block, x: block(x, torch.tensor(index)), Tokens),
        (Asking, lambda index, block, x: block(x), Tokens),
        (Asking, lambda index, block, x: block(x), Stopping),
        (Block, lambda index, block, x: block(x), Stopping),
    ],
)
def test_the_converted_model_computes_what_the_model_does(kind, step, model):
    original = model(kind, step).eval()
    converter = ModelConverter(validate_accuracy=False, select="all")
    fused = converter.convert_model(original, example_inputs=torch.randint(0, 20, (2, 5)))
    assert converter.conversion_stats["total_replaced"] > 0
    with torch.no_grad():
        for shape in ((2, 5), (3, 7), (1, 5)):
            ids = torch.randint(0, 20, shape)
            torch.testing.assert_close(fused(ids), original(ids), rtol=1e-4, atol=1e-4)
