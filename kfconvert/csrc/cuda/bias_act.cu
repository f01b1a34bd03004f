// y = act(x + bias + residual), or with grad: y = grad * act'(x + bias + residual); with scale x * scale stands
// for x
//   x, residual, grad, y: (numel), one memory layout;  bias, scale: (channels), channel of element
//   i = (i / inner) % channels
//
// Limited by memory bandwidth: each element is read and written once, 16 bytes a thread and access. The
// channel costs one multiplication a pack (a division by a constant is turned into it beforehand). In a
// forward pass the data were just written by a matrix product and mostly lie in the L2 cache, so that no
// streaming hints are given.
#include <type_traits>

#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

// How the bias and scale of a pack are found.
enum class Bias {
  none,
  pack,    // inner = 1 and channels fill whole packs: a pack of channels
  shared,  // inner fills whole packs: one channel for all
  lanes,   // anything else: each element its own
};

// to[j] = the value of the channel of element at + j
template <Bias kind, int N, class P, class Index, class Divider, class A>
__device__ __forceinline__ void load_channels(const P* from, Index at, const Divider& inner,
                                              const Divider& channels, A (&to)[N]) {
  if constexpr (kind == Bias::pack) {
    constexpr int M = N * sizeof(P) > kPackBytes ? kPackBytes / sizeof(P) : N;  // packs of at most 16 bytes
    const P* row = from + channels.remainder(at);
#pragma unroll
    for (int i = 0; i < N; i += M) {
      A part[M];
      load<M>(row + i, part);
#pragma unroll
      for (int j = 0; j < M; ++j) to[i + j] = part[j];
    }
  } else if constexpr (kind == Bias::shared) {
    const A value = widen(from[channels.remainder(inner.divide(at))]);
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = value;
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = widen(from[channels.remainder(inner.divide(at + j))]);
  }
}

// `scaled`: scale and bias are both there, in the accumulation type.
template <class T, int N, class Index, class Divider, Bias bias_kind, bool scaled>
__global__ void __launch_bounds__(kThreads) bias_act_kernel(BiasAct a, Divider inner, Divider channels) {
  using A = typename Accumulate<T>::type;
  const T* x = static_cast<const T*>(a.x);
  using Affine = std::conditional_t<scaled, A, T>;
  const Affine* bias = static_cast<const Affine*>(a.bias);
  const T* residual = static_cast<const T*>(a.residual);
  const T* grad = static_cast<const T*>(a.grad);
  T* y = static_cast<T*>(a.y);
  const A slope = static_cast<A>(a.slope);
  const Index packs = static_cast<Index>(a.numel / N);
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    const Index at = i * N;
    A v[N];
    A other[N];
    load<N>(x + at, v);
    if constexpr (scaled) {
      load_channels<bias_kind>(static_cast<const A*>(a.scale), at, inner, channels, other);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] *= other[j];
    }
    if constexpr (bias_kind != Bias::none) {
      load_channels<bias_kind>(bias, at, inner, channels, other);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] += other[j];
    }
    if (residual != nullptr) {
      load<N>(residual + at, other);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] += other[j];
    }
    if (grad != nullptr) {
      load<N>(grad + at, other);
      activate_backward_pack(a.activation, other, v, slope);
    } else {
      activate_pack<T>(a.activation, v, slope);
    }
    store<N>(y + at, v);
  }
}

template <class T, int N, class Index, class Divider, Bias bias_kind, bool scaled>
void launch_kernel(const BiasAct& a, cudaStream_t stream) {
  bias_act_kernel<T, N, Index, Divider, bias_kind, scaled>
      <<<elementwise_grid(a.numel / N), kThreads, 0, stream>>>(a, Divider(a.inner), Divider(a.channels));
}

// Any sizes and alignment, an element a thread.
template <class T>
void launch_scalar(const BiasAct& a, cudaStream_t stream) {
  if (a.scale != nullptr) return launch_kernel<T, 1, uint64_t, Divider64, Bias::lanes, true>(a, stream);
  if (a.bias == nullptr) return launch_kernel<T, 1, uint64_t, Divider64, Bias::none, false>(a, stream);
  launch_kernel<T, 1, uint64_t, Divider64, Bias::lanes, false>(a, stream);
}

template <class T, int N, bool scaled>
void launch_channels(const BiasAct& a, cudaStream_t stream) {
  if (a.inner == 1 && a.channels % N == 0 && aligned(a.bias) && aligned(a.scale)) {
    return launch_kernel<T, N, uint32_t, Divider32, Bias::pack, scaled>(a, stream);
  }
  if (a.inner > 1 && a.inner % N == 0)
    return launch_kernel<T, N, uint32_t, Divider32, Bias::shared, scaled>(a, stream);
  launch_kernel<T, N, uint32_t, Divider32, Bias::lanes, scaled>(a, stream);
}

template <class T, int N>
void launch_packed(const BiasAct& a, cudaStream_t stream) {
  if (a.scale != nullptr) return launch_channels<T, N, true>(a, stream);
  if (a.bias != nullptr) return launch_channels<T, N, false>(a, stream);
  launch_kernel<T, N, uint32_t, Divider32, Bias::none, false>(a, stream);
}

template <class T>
const T* advance(const void* pointer, int64_t elements) {
  return pointer == nullptr ? nullptr : static_cast<const T*>(pointer) + elements;
}

template <class T>
void launch(const BiasAct& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  // float64 is a reference type: one kernel is enough.
  const bool packed = sizeof(T) < 8 && a.numel % N == 0 && aligned(a.x) && aligned(a.y) &&
                      aligned(a.residual) && aligned(a.grad);
  if constexpr (sizeof(T) < 8) {
    if (packed && a.numel <= kMostElements) return launch_packed<T, N>(a, stream);
    // A larger tensor goes in pieces that start where the channels start anew.
    const int64_t period = a.inner * a.channels * N;
    if (packed && period <= kMostElements) {
      const int64_t piece = kMostElements / period * period;
      for (int64_t begin = 0; begin < a.numel; begin += piece) {
        BiasAct part = a;
        part.numel = a.numel - begin < piece ? a.numel - begin : piece;
        part.x = advance<T>(a.x, begin);
        part.residual = advance<T>(a.residual, begin);
        part.grad = advance<T>(a.grad, begin);
        part.y = static_cast<T*>(a.y) + begin;
        launch_packed<T, N>(part, stream);
      }
      return;
    }
  }
  launch_scalar<T>(a, stream);
}

}  // namespace

int launch_bias_act(const BiasAct& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
