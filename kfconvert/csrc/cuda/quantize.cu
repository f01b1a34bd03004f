// integers = clamp(round(reals / scale + zero_point), -128, 127), and reals = (integers - zero_point) * scale
//   reals, integers: (numel), one memory layout;  scale, zero_point: (channels), channel of element
//   i = (i / inner) % channels
//
// Limited by memory bandwidth: the reals of a thread are one access of 16 bytes, its integers one of 4 or 8.
#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

// bits: of integers, or 0: values are of type A.
template <Channels kind, int N, class Index, class Divider, class A>
__device__ __forceinline__ void load_parameter(const void* values, int bits, double value, Index at,
                                               const Divider& inner, const Divider& channels, A (&to)[N]) {
  if constexpr (kind != Channels::none) {
    if (values != nullptr && bits == 32)
      return load_channels<kind>(static_cast<const int32_t*>(values), at, inner, channels, to);
    if (values != nullptr && bits == 64)
      return load_channels<kind>(static_cast<const int64_t*>(values), at, inner, channels, to);
    if (values != nullptr) return load_channels<kind>(static_cast<const A*>(values), at, inner, channels, to);
  }
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] = static_cast<A>(value);
}

__device__ __forceinline__ float round_even(float v) { return rintf(v); }
__device__ __forceinline__ double round_even(double v) { return rint(v); }

// A NaN becomes 0.
template <class A>
__device__ __forceinline__ int8_t to_int8(A v) {
  if (!(v > A(-128))) v = v != v ? A(0) : A(-128);
  return static_cast<int8_t>(static_cast<int>(round_even(v < A(127) ? v : A(127))));
}

// `forward`: integers are made of reals.
template <class T, int N, class Index, class Divider, Channels kind, bool forward>
__global__ void __launch_bounds__(kThreads) quantize_kernel(Quantize a, Divider inner, Divider channels) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  T* reals = static_cast<T*>(a.reals);
  const Index packs = static_cast<Index>(a.numel / N);
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    const Index at = i * N;
    A scale[N];
    A zero_point[N];
    load_parameter<kind>(a.scale, 0, a.scale_value, at, inner, channels, scale);
    load_parameter<kind>(a.zero_point, a.zero_point_bits, a.zero_point_value, at, inner, channels, zero_point);
    Pack<int8_t, N> integers;
    A v[N];
    if constexpr (forward) {
      load<N>(reals + at, v);
#pragma unroll
      for (int j = 0; j < N; ++j) integers.v[j] = to_int8(v[j] / scale[j] + zero_point[j]);
      store_pack(a.integers + at, integers);
    } else {
      integers = load_pack<Pack<int8_t, N>>(a.integers + at);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = (static_cast<A>(integers.v[j]) - zero_point[j]) * scale[j];
      store<N>(reals + at, v);
    }
  }
}

template <class T, int N, class Index, class Divider, Channels kind, bool forward>
void launch_kernel(const Quantize& a, cudaStream_t stream) {
  launch_overlapped(quantize_kernel<T, N, Index, Divider, kind, forward>, elementwise_grid(a.numel / N), kThreads,
                    stream, a, Divider(a.inner), Divider(a.channels));
}

template <class T, bool forward>
void launch(const Quantize& a, cudaStream_t stream) {
  const bool plain = a.scale == nullptr && a.zero_point == nullptr;
  // float64 is a reference type: one kernel is enough.
  if constexpr (sizeof(T) < 8) {
    constexpr int N = kPackBytes / sizeof(T);
    if (a.numel % N == 0 && a.numel <= kMostElements && aligned(a.reals) && aligned(a.integers)) {
      if (plain) return launch_kernel<T, N, uint32_t, Divider32, Channels::none, forward>(a, stream);
      return dispatch_channels<N>(a.inner, a.channels, {a.scale, a.zero_point}, [&](auto kind) {
        launch_kernel<T, N, uint32_t, Divider32, kind(), forward>(a, stream);
      });
    }
  }
  if (plain) return launch_kernel<T, 1, uint64_t, Divider64, Channels::none, forward>(a, stream);
  launch_kernel<T, 1, uint64_t, Divider64, Channels::lanes, forward>(a, stream);
}

}  // namespace

int launch_quantize(const Quantize& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, (launch<T, true>(a, static_cast<cudaStream_t>(stream))));
  return cudaGetLastError();
}

int launch_dequantize(const Quantize& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, (launch<T, false>(a, static_cast<cudaStream_t>(stream))));
  return cudaGetLastError();
}

}  // namespace kfc
