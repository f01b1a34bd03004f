"""The smallest model in which something is fused."""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.relu(self.linear(x))


X = torch.randn(2, 6)  # what it is called with
