// softcap(x, cap) = cap * tanh(x / cap) and its gradient, for tensors of float32 or float64 on a GPU.
//
// Only the kernels are here; example_operator.py compiles this file and tells torch the rest. The headers are
// those of torch's stable ABI, which compile in seconds; torch/extension.h takes a minute or more.
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kThreads = 256;

template <class T>
__global__ void softcap_kernel(const T* x, T* y, int64_t n, T cap) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    y[i] = cap * tanh(x[i] / cap);
  }
}

template <class T>
__global__ void softcap_backward_kernel(const T* grad, const T* y, T* grad_x, int64_t n, T cap) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const T t = y[i] / cap;
    grad_x[i] = grad[i] * (1 - t * t);
  }
}

unsigned blocks(int64_t n) { return static_cast<unsigned>(std::min<int64_t>((n + kThreads - 1) / kThreads, 65535)); }

// Not the default stream: torch may be recording, or running several streams.
cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  const bool found = aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream) == AOTI_TORCH_SUCCESS;
  STD_TORCH_CHECK(found, "example::softcap: no current stream");
  return static_cast<cudaStream_t>(stream);
}

void check_launch() {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "example::softcap: ", cudaGetErrorString(error));
}

Tensor softcap(const Tensor& x, double cap) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor dense = torch::stable::contiguous(x);
  const Tensor y = torch::stable::empty_like(dense);
  const int64_t n = x.numel();
  if (n == 0) return y;
  const auto launch = [&](auto zero) {
    using T = decltype(zero);
    softcap_kernel<T><<<blocks(n), kThreads, 0, current_stream(x)>>>(
        static_cast<const T*>(dense.data_ptr()), static_cast<T*>(y.data_ptr()), n, static_cast<T>(cap));
  };
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Double,
                  "example::softcap: expected float32 or float64");
  dtype == ScalarType::Float ? launch(0.0f) : launch(0.0);
  check_launch();
  return y;
}

Tensor softcap_backward(const Tensor& grad, const Tensor& y, double cap) {
  const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
  const Tensor dense = torch::stable::contiguous(grad);  // y is: it comes from softcap
  const Tensor grad_x = torch::stable::empty_like(dense);
  const int64_t n = y.numel();
  if (n == 0) return grad_x;
  const auto launch = [&](auto zero) {
    using T = decltype(zero);
    softcap_backward_kernel<T><<<blocks(n), kThreads, 0, current_stream(y)>>>(
        static_cast<const T*>(dense.data_ptr()), static_cast<const T*>(y.data_ptr()),
        static_cast<T*>(grad_x.data_ptr()), n, static_cast<T>(cap));
  };
  y.scalar_type() == ScalarType::Float ? launch(0.0f) : launch(0.0);
  check_launch();
  return grad_x;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(example, CUDA, m) {
  m.impl("softcap", TORCH_BOX(&softcap));
  m.impl("softcap_backward", TORCH_BOX(&softcap_backward));
}
