// y = act(gate) * up, or with grad: y = grad * up * act'(gate) and grad_up = grad * act(gate)
//   gate, up: (rows, cols), rows gate_stride and up_stride elements apart;  grad, y, grad_up: (rows, cols)
//
// Limited by memory bandwidth: each element is read and written once, 16 bytes a thread and access. The row of a
// pack costs one multiplication.
#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

template <class T, int N, class Index, class Divider>
__global__ void __launch_bounds__(kThreads) act_mul_kernel(ActMul a, Divider cols) {
  using A = typename Accumulate<T>::type;
  const T* gates = static_cast<const T*>(a.gate);
  const T* ups = static_cast<const T*>(a.up);
  const T* grads = static_cast<const T*>(a.grad);
  T* y = static_cast<T*>(a.y);
  T* grad_up = static_cast<T*>(a.grad_up);
  const A slope = static_cast<A>(a.slope);
  const Index packs = static_cast<Index>(a.rows * a.cols / N);
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    const Index at = i * N;
    const Index row = cols.divide(at);
    const Index col = at - row * cols.divisor;
    Pack<A, N> gate;
    A up[N];
    load<N>(gates + static_cast<int64_t>(row) * a.gate_stride + col, gate.v);
    load<N>(ups + static_cast<int64_t>(row) * a.up_stride + col, up);
    if (grads == nullptr) {
      activate_pack<T>(a.activation, gate.v, slope);
#pragma unroll
      for (int j = 0; j < N; ++j) gate.v[j] *= up[j];
      store<N>(y + at, gate.v);
    } else {
      Pack<A, N> grad;
      load<N>(grads + at, grad.v);
      Pack<A, N> other = gate;
      activate_pack<T>(a.activation, other.v, slope);
#pragma unroll
      for (int j = 0; j < N; ++j) other.v[j] *= grad.v[j];
      store<N>(grad_up + at, other.v);
#pragma unroll
      for (int j = 0; j < N; ++j) grad.v[j] *= up[j];
      store<N>(y + at, activate_backward_call(a.activation, grad, gate, slope).v);
    }
  }
}

template <class T, int N, class Index, class Divider>
void launch_kernel(const ActMul& a, cudaStream_t stream) {
  act_mul_kernel<T, N, Index, Divider>
      <<<elementwise_grid(a.rows * a.cols / N), kThreads, 0, stream>>>(a, Divider(a.cols));
}

template <class T>
void launch(const ActMul& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  // float64 is a reference type: one kernel is enough.
  if constexpr (sizeof(T) < 8) {
    const bool packed = a.cols % N == 0 && a.gate_stride % N == 0 && a.up_stride % N == 0 && aligned(a.gate) &&
                        aligned(a.up) && aligned(a.grad) && aligned(a.y) && aligned(a.grad_up);
    if (packed && a.rows * a.cols <= kMostElements) return launch_kernel<T, N, uint32_t, Divider32>(a, stream);
    if (packed) return launch_kernel<T, N, uint64_t, Divider64>(a, stream);
  }
  launch_kernel<T, 1, uint64_t, Divider64>(a, stream);
}

}  // namespace

int launch_act_mul(const ActMul& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
