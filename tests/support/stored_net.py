"""A model of which an artifact keeps the graphs."""

import os

import torch
from torch import nn

FACTOR = 2.0


def shifted(x):
    return x + 1.0


class Block(nn.Module):
    def __init__(self, number: int):
        super().__init__()
        self.number, self.scale = number, 0.5
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        return self.norm(x + torch.relu(self.up(x)) * self.scale)


class Net(nn.Module):
    """Free sizes, a condition on one of them, a number made a tensor, blocks of one structure, and a dict returned."""

    def __init__(self):
        super().__init__()
        self.names = ["hidden", "mean"]
        self.embedding = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList(map(Block, range(2)))
        self.register_buffer("positions", torch.randn(12, 8))

    def forward(self, input_ids):
        length = input_ids.shape[1]
        x = self.embedding(input_ids) + self.positions[:length]
        for block in self.blocks:
            x = block(x)
        x = shifted(x) * FACTOR * torch.tensor(0.25)
        return dict(zip(self.names, (x, x.mean(1))))


class Settings:
    def __init__(self):
        self.factor = 2.0


class Asking(nn.Module):
    """Reads an object of its own, and the environment by a name that it puts together."""

    def __init__(self):
        super().__init__()
        self.settings, self.linear, self.mark = Settings(), nn.Linear(8, 8), "_"

    def forward(self, x):
        x = torch.relu(self.linear(x)) * self.settings.factor
        return x if self.mark and os.environ.get("".join(("STORED_", "NET"))) is None else -x
