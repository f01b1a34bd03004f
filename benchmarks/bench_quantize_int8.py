"""Time quantize_int8 over float32 tensors of 100 K to 50 M elements: plain PyTorch, torch.compile, and the kernels.

PYTHONPATH=. python benchmarks/bench_quantize_int8.py [--small] [--device cuda] [--plot times.png]
"""

import torch
from sizes import main, of_every_family

SCALE, ZERO_POINT = 0.02, 3


def inputs(elements, device):
    return torch.randn(elements, device=device), SCALE, ZERO_POINT


def implementations(device):
    return of_every_family("quantize_int8", device)


if __name__ == "__main__":
    main(__doc__, inputs, implementations)
