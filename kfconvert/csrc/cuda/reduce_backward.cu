// The gradients of sums over rows of squares, magnitudes or squared differences
//   grad_x = factor * grad * (2 x, sign(x) or 2 (x - other));  grad_other = -grad_x
//   x, other, grad_x, grad_other: (rows, cols);  grad: (rows)
//
// Limited by memory bandwidth: each element is read and written once, 16 bytes a thread and access. Threads take
// elements, not rows, so that one long row fills the device as many short ones do.
#include "../common/reduce_terms.h"
#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

// Elements `at` and the N - 1 after it, which lie in one row.
template <class F, class T, int N, class Index, class Divider>
__device__ __forceinline__ void differentiate(const ReduceBackward& a, const Divider& cols, Index at) {
  using A = typename Accumulate<T>::type;
  A x[N];
  A other[N] = {};
  A grad[1];
  load<N>(static_cast<const T*>(a.x) + at, x);
  if constexpr (F::binary) load<N>(static_cast<const T*>(a.other) + at, other);
  load_affine<1, T>(a.grad, a.grad_dtype == DType::f32, cols.divide(at), grad);
  grad[0] *= static_cast<A>(a.factor);
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = F::derivative(x[j], other[j]) * grad[0];
  store<N>(static_cast<T*>(a.grad_x) + at, x);
  if constexpr (F::binary) {
    if (a.grad_other == nullptr) return;
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = -x[j];
    store<N>(static_cast<T*>(a.grad_other) + at, x);
  }
}

// `cols` of whole packs of N elements, or a single row.
template <class F, class T, int N, class Index, class Divider>
__global__ void __launch_bounds__(kThreads) reduce_backward_kernel(ReduceBackward a, Divider cols) {
  wait_for_previous_kernel();
  const Index numel = static_cast<Index>(a.rows * a.cols);
  const Index packs = numel / N;
  const Index first = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = first; i < packs; i += step) differentiate<F, T, N>(a, cols, i * N);
  const Index rest = packs * N + first;
  if (N > 1 && rest < numel) differentiate<F, T, 1>(a, cols, rest);
}

template <class F, class T, int N, class Index, class Divider>
void launch_kernel(const ReduceBackward& a, cudaStream_t stream) {
  const int64_t packs = (a.rows * a.cols + N - 1) / N;
  launch_overlapped(reduce_backward_kernel<F, T, N, Index, Divider>, elementwise_grid(packs), kThreads, stream, a,
                    Divider(a.cols));
}

template <class F, class T>
void launch(const ReduceBackward& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  // float64 is a reference type: one kernel is enough.
  if constexpr (sizeof(T) < 8) {
    const bool packed = (a.rows == 1 || a.cols % N == 0) && aligned(a.x) && aligned(a.other) && aligned(a.grad_x) &&
                        aligned(a.grad_other);
    const bool few = a.rows * a.cols <= kMostElements;
    if (packed && few) return launch_kernel<F, T, N, uint32_t, Divider32>(a, stream);
    if (packed) return launch_kernel<F, T, N, uint64_t, Divider64>(a, stream);
    if (few) return launch_kernel<F, T, 1, uint32_t, Divider32>(a, stream);
  }
  launch_kernel<F, T, 1, uint64_t, Divider64>(a, stream);
}

}  // namespace

int launch_reduce_backward(const ReduceBackward& a, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  KFC_DISPATCH_DIFFERENTIABLE_TERM(a.term, KFC_DISPATCH_DTYPE(a.dtype, (launch<F, T>(a, cuda_stream))));
  return cudaGetLastError();
}

}  // namespace kfc
