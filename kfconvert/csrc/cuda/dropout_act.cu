// y = dropout(act(x + bias)) + residual, or with grad: y = dropout(grad) * act'(x + bias)
//   x, residual, grad, y: (numel), one memory layout;  bias: (channels), channel of element i = (i / inner) % channels
//
// Which elements are dropped follows from their number, a seed and a sequence alone, so that no mask is written. In a
// captured graph these are read from the device, where each replay draws new ones. Limited by memory bandwidth; the
// random words cost 70 integer instructions for each four elements.
#include "dropout.cuh"
#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

template <class T, int N, class Index, class Divider, Channels kind>
__global__ void __launch_bounds__(kThreads) dropout_act_kernel(DropoutAct a, Divider inner, Divider channels) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  const T* x = static_cast<const T*>(a.terms.x);
  const T* bias = static_cast<const T*>(a.terms.bias);
  const T* residual = static_cast<const T*>(a.terms.residual);
  const T* grad = static_cast<const T*>(a.terms.grad);
  T* y = static_cast<T*>(a.terms.y);
  const A slope = static_cast<A>(a.terms.slope);
  const DropoutState state(a);
  const Index packs = static_cast<Index>(a.terms.numel / N);
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    const Index at = i * N;
    A v[N];
    A other[N];
    load<N>(x + at, v);
    add_channels<kind>(bias, at, inner, channels, v);
    if (grad != nullptr) {
      load<N>(grad + at, other);
      drop<N>(a, state, at, other);
      // The derivatives of all activations from their inputs: the outputs were not kept.
      activate_backward_as<kAny, T>(a.terms.activation, other, v, slope);
      store<N>(y + at, other);
    } else {
      activate_pack<T>(a.terms.activation, v, slope);
      drop<N>(a, state, at, v);
      if (residual != nullptr) {
        load<N>(residual + at, other);
#pragma unroll
        for (int j = 0; j < N; ++j) v[j] += other[j];
      }
      store<N>(y + at, v);
    }
  }
}

template <class T, int N, class Index, class Divider, Channels kind>
void launch_kernel(const DropoutAct& a, cudaStream_t stream) {
  launch_overlapped(dropout_act_kernel<T, N, Index, Divider, kind>, elementwise_grid(a.terms.numel / N), kThreads,
                    stream, a, Divider(a.terms.inner), Divider(a.terms.channels));
}

template <class T>
void launch(const DropoutAct& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const BiasAct& terms = a.terms;
  // float64 is a reference type: one kernel is enough.
  if constexpr (sizeof(T) < 8) {
    const bool packed = terms.numel % N == 0 && terms.numel <= kMostElements && aligned(terms.x) && aligned(terms.y) &&
                        aligned(terms.residual) && aligned(terms.grad);
    if (packed && terms.bias == nullptr)
      return launch_kernel<T, N, uint32_t, Divider32, Channels::none>(a, stream);
    if (packed) {
      return dispatch_channels<N>(terms.inner, terms.channels, {terms.bias}, [&](auto kind) {
        launch_kernel<T, N, uint32_t, Divider32, kind()>(a, stream);
      });
    }
  }
  if (terms.bias == nullptr) return launch_kernel<T, 1, uint64_t, Divider64, Channels::none>(a, stream);
  launch_kernel<T, 1, uint64_t, Divider64, Channels::lanes>(a, stream);
}

}  // namespace

int launch_dropout_act(const DropoutAct& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.terms.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
