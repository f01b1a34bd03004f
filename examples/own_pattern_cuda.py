"""A fusion of one's own by CUDA: cap * tanh(x / cap), for any cap.    python examples/own_pattern_cuda.py"""

import functools
import sys

import torch
from torch import nn

import kfconvert

SOURCE = """
#include <c10/cuda/CUDAGuard.h>
#include <torch/extension.h>

template <class T> __global__ void softcap_kernel(const T* x, T* y, int64_t n, float cap) {
  const int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x;
  if (i < n) y[i] = T(cap * tanhf(float(x[i]) / cap));
}
torch::Tensor softcap(torch::Tensor x, double cap) {
  const c10::cuda::CUDAGuard guard(x.device());
  const auto y = torch::empty_like(x);
  if (x.numel() == 0) return y;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "softcap", [&] {
    softcap_kernel<<<(x.numel() + 255) / 256, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
        x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), x.numel(), float(cap));
  });
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""


def softcap(x, cap):
    """The reference. Any number may stand where the example has a float, such as this cap."""
    return cap * torch.tanh(x / cap)


@functools.cache
def compiled():
    return kfconvert.get_cuda_compiler().compile_from_source(SOURCE, "own_softcap", functions=["softcap"])


class Net(nn.Linear):
    def forward(self, x):
        return softcap(super().forward(x), 30.0)


def main():
    if not torch.cuda.is_available():
        sys.exit("own_pattern_cuda: a CUDA kernel needs a CUDA GPU, and torch finds none")
    example = (torch.randn(8, 64, device="cuda"), 50.0)
    kfconvert.register_pattern(softcap, lambda x, cap: compiled().softcap(x, cap), example, name="own_softcap")
    converter = kfconvert.ModelConverter()
    converter.convert_model(Net(4096, 4096).cuda(), example_inputs=torch.randn(512, 4096, device="cuda"), profile=True)
    print(converter.explain())


if __name__ == "__main__":
    main()
