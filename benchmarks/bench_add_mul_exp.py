"""Time exp((x + y) * 2) over float32 tensors of 100 K to 50 M elements: plain PyTorch, torch.compile, and the kernels.

PYTHONPATH=. python benchmarks/bench_add_mul_exp.py [--small] [--device cuda] [--plot times.png]
"""

import torch
from sizes import main, of_every_family


def inputs(elements, device):
    return torch.randn(elements, device=device) / 4, torch.randn(elements, device=device) / 4


def implementations(device):
    return of_every_family("add_mul_exp", device)


if __name__ == "__main__":
    main(__doc__, inputs, implementations)
