"""A benchmark of a function of your own: copy this file, and put your own in the place of the two functions.

PYTHONPATH=. python benchmarks/bench_template.py [--small] [--device cuda] [--plot times.png]
"""

import torch
from sizes import main

COLUMNS = 100


def inputs(elements, device):
    """The arguments of one call on so many elements."""
    return (torch.randn(elements // COLUMNS, COLUMNS, device=device),)


def implementations(device):
    """By name functions that compute the same; the others are compared with the first."""
    return {
        "softmax spelled out": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
        "torch.softmax": lambda x: torch.softmax(x, -1),
    }


if __name__ == "__main__":
    main(__doc__, inputs, implementations)
