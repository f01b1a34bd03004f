"""Blocks that share a plain Python object, or ask for the type of a number: never one graph for what differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kfconvert import ModelConverter

SIZES = ((2, 12), (3, 5), (2, 100))


class Shared:
    """What the blocks of a model share."""

    count = 0
    window: int | None = None
    last: Tensor | None = None


class Block(nn.Module):
    """``seen`` tells the block in which of the ways it looks at what it shares."""

    def __init__(self, shared: Shared, window: int, seen: str):
        super().__init__()
        self._shared, self.seen = shared, seen
        self.window = window if seen == "isinstance" else 0
        self.norm, self.mlp = nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(x))
        if self.seen == "count":
            self._shared.count += 1
            return x + y * self._shared.count
        if self.seen == "last":
            if self._shared.last is not None:
                y = y + self._shared.last
            self._shared.last = y
            return x + y
        window = self.window if self.seen == "isinstance" else self._shared.window
        if isinstance(window, int):  # the tokens within it only
            places = torch.arange(x.shape[1])
            near = ((places[:, None] - places).abs() < window).to(y.dtype)
            y = near @ y / near.sum(-1, keepdim=True)
        return x + y


class Model(nn.Module):
    def __init__(self, seen: str, whole: bool):
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.windows, self.whole = Shared(), (16, 32, 64), whole
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block(self.shared, window, seen) for window in self.windows)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        self.shared.count, self.shared.last = 0, None
        if not self.whole and x.sum() > 1e9:
            return x
        for block, window in zip(self.blocks, self.windows):
            self.shared.window = window
            x = block(x)
        return x


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "parts"])
@pytest.mark.parametrize("seen", ["isinstance", "window", "count", "last"])
@pytest.mark.filterwarnings("ignore:kfconvert")
def test_the_converted_model_computes_what_the_model_does(seen, whole):
    model = Model(seen, whole).eval()
    converter = ModelConverter(select="all", effort="fast")
    converted = converter.convert_model(model, example_inputs=torch.randint(0, 50, SIZES[0]))
    for size in SIZES:
        ids = torch.randint(0, 50, size)
        with torch.no_grad():
            torch.testing.assert_close(converted(ids), model(ids))
    accuracy = converter.conversion_stats["accuracy"]
    # A converted model that is compared with itself would have its own error there.
    assert accuracy is None or accuracy["original_error"] is None or accuracy["original_error"]["max_rel"] < 1e-5
