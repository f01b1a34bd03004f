// scale = weight / sqrt(variance + eps), shift = bias + (before - mean) * scale, in double
//   all: (channels), a channel a thread
//
// Limited by the latency of one read: there are few channels.
#include "kernels.h"
#include "vector.cuh"

namespace kfc {
namespace {

constexpr int kThreads = 128;

template <class T>
__global__ void __launch_bounds__(kThreads) fold_batch_norm_kernel(FoldBatchNorm a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (c >= a.channels) return;
  const auto read = [c](const void* values, double otherwise) {
    return values == nullptr ? otherwise : static_cast<double>(widen(static_cast<const T*>(values)[c]));
  };
  const double scale = read(a.weight, 1.0) / sqrt(read(a.variance, 0.0) + a.eps);
  static_cast<A*>(a.scale)[c] = static_cast<A>(scale);
  static_cast<A*>(a.shift)[c] = static_cast<A>(read(a.bias, 0.0) + (read(a.before, 0.0) - read(a.mean, 0.0)) * scale);
}

}  // namespace

int launch_fold_batch_norm(const FoldBatchNorm& a, void* stream) {
  const unsigned grid = static_cast<unsigned>((a.channels + kThreads - 1) / kThreads);
  KFC_DISPATCH_DTYPE(a.dtype, launch_overlapped(fold_batch_norm_kernel<T>, grid, kThreads,
                                                static_cast<cudaStream_t>(stream), a));
  return cudaGetLastError();
}

}  // namespace kfc
