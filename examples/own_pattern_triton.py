"""A fusion of one's own by Triton: x * sigmoid(1.7 x), in any model.    python examples/own_pattern_triton.py"""

import sys
import tempfile

import torch
from torch import nn

import kfconvert

try:
    import triton
    import triton.language as tl
except ImportError:
    sys.exit("own_pattern_triton: Triton is not installed: pip install triton")


def swish(x):
    """The reference: what is looked for in models, and what gradients and compilers get."""
    return x * torch.sigmoid(1.7 * x)


@triton.jit
def swish_kernel(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, at < n).to(tl.float32)
    tl.store(y + at, value * tl.sigmoid(1.7 * value), at < n)


def swish_triton(x):
    """The replacement: x is contiguous, and the result is new memory."""
    y = torch.empty_like(x)
    swish_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
    return y


class Net(nn.Linear):
    def forward(self, x):
        return swish(super().forward(x))


def main():
    if not torch.cuda.is_available():
        sys.exit("own_pattern_triton: Triton needs a CUDA GPU, and torch finds none")
    kfconvert.register_pattern(swish, swish_triton, torch.randn(8, 64, device="cuda"), name="own_swish")
    converter = kfconvert.ModelConverter()
    x = torch.randn(512, 4096, device="cuda", dtype=torch.float16)
    fused = converter.convert_model(Net(4096, 4096).half().cuda(), example_inputs=x, profile=True)
    print(converter.explain())
    with tempfile.TemporaryDirectory() as folder:  # an artifact names the two functions, and runs them where trusted
        again = kfconvert.load(kfconvert.save(fused, folder), model=Net(4096, 4096), trust_source=True)
    print("loaded, with", again.kfconvert_info()["own_swish_replaced"], "site of own_swish")


if __name__ == "__main__":
    main()
