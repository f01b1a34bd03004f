// y = act(x + other), act(x * other) or act(x) * other, or with grad the two gradients of one of the last two
//   y, grad, grad_other: (numel), dense;  x, other: broadcast to the same `sizes`, any strides
//
// Limited by memory bandwidth: each element is read and written once, 16 bytes a thread and access where the
// innermost dimension allows it. Where a pack lies costs a multiplication for each further dimension.
#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

// Elements `at` and the N - 1 after it, which lie in one row of the innermost dimension, or are one element repeated.
template <int N, class T, class A>
__device__ __forceinline__ void load_operand(const void* data, int64_t at, bool repeated, A (&to)[N]) {
  const T* from = static_cast<const T*>(data) + at;
  if (N > 1 && repeated) {
    const A value = widen(*from);
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = value;
  } else {
    load<N>(from, to);
  }
}

template <class A, int N>
__device__ __forceinline__ void multiply(A (&v)[N], const A (&by)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] *= by[j];
}

// Where both operands lie as the result does: nothing is looked up, and with a kernel for each activation a small
// tensor does not wait for the choice of one.
template <class T, int N, Combination combination, int act, bool backward>
__global__ void __launch_bounds__(kThreads) flat_kernel(const T* from_x, const T* from_other, const T* from_grad, T* y,
                                                        T* grad_other, double given_slope, uint32_t packs) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  using M = typename MathFor<T>::type;
  constexpr Act kAct = static_cast<Act>(act);
  constexpr bool kGated = combination == Combination::gated;
  const A slope = static_cast<A>(given_slope);
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < packs; i += step) {
    A x[N];
    A other[N];
    A grad[N];
    load<N>(from_x + i * N, x);
    load<N>(from_other + i * N, other);
    if constexpr (backward) load<N>(from_grad + i * N, grad);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A v = kGated ? x[j] : combination == Combination::product ? x[j] * other[j] : x[j] + other[j];
      if constexpr (!backward) {
        const A activated = activate<kAct, M>(v, slope);
        x[j] = kGated ? activated * other[j] : activated;
      } else if constexpr (kGated) {
        x[j] = activate_backward_from_input<kAct, M>(grad[j] * other[j], v, slope);
        other[j] = grad[j] * activate<kAct, M>(v, slope);
      } else {
        const A g = activate_backward_from_input<kAct, M>(grad[j], v, slope);
        const A of_other = g * x[j];
        x[j] = g * other[j];
        other[j] = of_other;
      }
    }
    store<N>(y + i * N, x);
    if constexpr (backward) store<N>(grad_other + i * N, other);
  }
}

template <class T, int N, class Index, class Divider>
__global__ void __launch_bounds__(kThreads) combine_act_kernel(CombineAct a, Dividers<Divider> sizes) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  const T* grads = static_cast<const T*>(a.grad);
  T* y = static_cast<T*>(a.y);
  T* grad_other = static_cast<T*>(a.grad_other);
  const A slope = static_cast<A>(a.slope);
  const bool product = a.combination == Combination::product;
  const bool gated = a.combination == Combination::gated;
  const int inner = a.dims - 1;
  const bool x_repeated = a.x.strides[inner] == 0;
  const bool other_repeated = a.other.strides[inner] == 0;
  const Index packs = static_cast<Index>(a.numel / N);
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    const Index at = i * N;
    Pack<A, N> x;
    Pack<A, N> other;
    int64_t x_at = 0;
    int64_t other_at = 0;
    for_dimensions(at, a.dims, sizes, [&](int dim, int64_t here) {
      x_at += here * a.x.strides[dim];
      other_at += here * a.other.strides[dim];
    });
    load_operand<N, T>(a.x.data, x_at, x_repeated, x.v);
    load_operand<N, T>(a.other.data, other_at, other_repeated, other.v);
    Pack<A, N> v = x;
    if (!gated) {
#pragma unroll
      for (int j = 0; j < N; ++j) v.v[j] = product ? x.v[j] * other.v[j] : x.v[j] + other.v[j];
    }
    if (grads == nullptr) {
      activate_pack<T>(a.activation, v.v, slope);
      if (gated) multiply(v.v, other.v);
      store<N>(y + at, v.v);
    } else {
      Pack<A, N> grad;
      load<N>(grads + at, grad.v);
      if (gated) {
        Pack<A, N> of_other = activate_call<T>(a.activation, v, slope);
        multiply(of_other.v, grad.v);
        store<N>(grad_other + at, of_other.v);
        multiply(grad.v, other.v);
        store<N>(y + at, activate_backward_call<T>(a.activation, grad, v, slope).v);
      } else {
        grad = activate_backward_call<T>(a.activation, grad, v, slope);
        multiply(other.v, grad.v);
        multiply(x.v, grad.v);
        store<N>(y + at, other.v);
        store<N>(grad_other + at, x.v);
      }
    }
  }
}

template <class T, int N, Combination combination, int act>
void launch_flat(const CombineAct& a, cudaStream_t stream) {
  const auto launch_one = [&](auto kernel) {
    launch_overlapped(kernel, elementwise_grid(a.numel / N), kThreads, stream, static_cast<const T*>(a.x.data),
                      static_cast<const T*>(a.other.data), static_cast<const T*>(a.grad), static_cast<T*>(a.y),
                      static_cast<T*>(a.grad_other), a.slope, static_cast<uint32_t>(a.numel / N));
  };
  if (a.grad == nullptr) return launch_one(flat_kernel<T, N, combination, act, false>);
  if constexpr (combination != Combination::sum) launch_one(flat_kernel<T, N, combination, act, true>);
}

template <class T, int N>
void dispatch_flat(const CombineAct& a, cudaStream_t stream) {
  const auto launch_one = [&](auto combination) {
    KFC_DISPATCH_ACTIVATION(a.activation,
                            (launch_flat<T, N, decltype(combination)::value, static_cast<int>(act)>(a, stream)));
  };
  switch (a.combination) {
    case Combination::sum:
      return launch_one(std::integral_constant<Combination, Combination::sum>());
    case Combination::product:
      return launch_one(std::integral_constant<Combination, Combination::product>());
    case Combination::gated:
      return launch_one(std::integral_constant<Combination, Combination::gated>());
  }
}

template <class T, int N, class Index, class Divider>
void launch_kernel(const CombineAct& a, cudaStream_t stream) {
  launch_overlapped(combine_act_kernel<T, N, Index, Divider>, elementwise_grid(a.numel / N), kThreads, stream, a,
                    Dividers<Divider>(a.sizes, a.dims));
}

// Whether packs of N elements of t lie together, 16 bytes from 16 bytes.
bool packs_of(const Broadcast& t, int dims, int64_t n) {
  const int64_t inner = t.strides[dims - 1];
  if (inner == 0) return true;
  bool fits = inner == 1 && aligned(t.data);
  for (int i = 0; i < dims - 1; ++i) fits = fits && t.strides[i] % n == 0;
  return fits;
}

template <class T>
void launch(const CombineAct& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  // float64 is a reference type: one kernel is enough.
  if constexpr (sizeof(T) < 8) {
    const bool packed = a.sizes[a.dims - 1] % N == 0 && packs_of(a.x, a.dims, N) && packs_of(a.other, a.dims, N) &&
                        aligned(a.y) && aligned(a.grad) && aligned(a.grad_other);
    const bool flat = a.dims == 1 && a.x.strides[0] == 1 && a.other.strides[0] == 1;
    if (packed && flat && a.numel <= kMostElements) return dispatch_flat<T, N>(a, stream);
    if (packed && a.numel <= kMostElements) return launch_kernel<T, N, uint32_t, Divider32>(a, stream);
    if (packed) return launch_kernel<T, N, uint64_t, Divider64>(a, stream);
  }
  launch_kernel<T, 1, uint64_t, Divider64>(a, stream);
}

}  // namespace

int launch_combine_act(const CombineAct& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
