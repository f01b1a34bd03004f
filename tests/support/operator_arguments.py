"""Arguments of the operators by name: the declared examples, small and of odd shapes."""

import torch

from kfconvert.ops.declaration import OPERATORS


def arguments(name, device, dtype=torch.float32):
    return OPERATORS[name].example(lambda *shape: torch.randn(shape, device=device).to(dtype), 5, 33)
