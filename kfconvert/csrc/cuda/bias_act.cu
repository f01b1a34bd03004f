// y = act(x + bias + residual), or with grad: y = grad * act'(x + bias + residual); with scale x * scale stands
// for x; with slopes prelu stands for act
//   x, residual, grad, y: (numel), one memory layout;  bias, scale, slopes: (channels), channel of element
//   i = (i / inner) % channels
//
// Limited by memory bandwidth: each element is read and written once, 16 bytes a thread and access. The
// channel costs one multiplication a pack (a division by a constant is turned into it beforehand). In a
// forward pass the data were just written by a matrix product and mostly lie in the L2 cache, so that no
// streaming hints are given.
#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

enum class Form {
  sum,
  scaled,  // scale and bias are both there, in the accumulation type
  prelu,   // bias and slopes are both there
};

template <class T, int N, class Index, class Divider, Channels kind, Form form>
__global__ void __launch_bounds__(kThreads) bias_act_kernel(BiasAct a, Divider inner, Divider channels) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  const T* x = static_cast<const T*>(a.x);
  using Affine = std::conditional_t<form == Form::scaled, A, T>;
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
    if constexpr (form == Form::scaled) {
      load_channels<kind>(static_cast<const A*>(a.scale), at, inner, channels, other);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] *= other[j];
    }
    add_channels<kind>(bias, at, inner, channels, v);
    if (residual != nullptr) {
      load<N>(residual + at, other);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] += other[j];
    }
    if constexpr (form == Form::prelu) {
      load_channels<kind>(static_cast<const T*>(a.slopes), at, inner, channels, other);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = v[j] > A(0) ? v[j] : v[j] * other[j];
    } else if (grad != nullptr) {
      load<N>(grad + at, other);
      activate_backward_pack<T>(a.activation, other, v, slope);
    } else {
      activate_pack<T>(a.activation, v, slope);
    }
    store<N>(y + at, v);
  }
}

template <class T, int N, class Index, class Divider, Channels kind, Form form>
void launch_kernel(const BiasAct& a, cudaStream_t stream) {
  launch_overlapped(bias_act_kernel<T, N, Index, Divider, kind, form>, elementwise_grid(a.numel / N), kThreads, stream,
                    a, Divider(a.inner), Divider(a.channels));
}

// Any sizes and alignment, an element a thread.
template <class T>
void launch_scalar(const BiasAct& a, cudaStream_t stream) {
  if (a.scale != nullptr) return launch_kernel<T, 1, uint64_t, Divider64, Channels::lanes, Form::scaled>(a, stream);
  if (a.slopes != nullptr) return launch_kernel<T, 1, uint64_t, Divider64, Channels::lanes, Form::prelu>(a, stream);
  if (a.bias == nullptr) return launch_kernel<T, 1, uint64_t, Divider64, Channels::none, Form::sum>(a, stream);
  launch_kernel<T, 1, uint64_t, Divider64, Channels::lanes, Form::sum>(a, stream);
}

template <class T, int N, Form form>
void launch_channels(const BiasAct& a, cudaStream_t stream) {
  dispatch_channels<N>(a.inner, a.channels, {a.bias, a.scale, a.slopes},
                       [&](auto kind) { launch_kernel<T, N, uint32_t, Divider32, kind(), form>(a, stream); });
}

template <class T, int N>
void launch_packed(const BiasAct& a, cudaStream_t stream) {
  if (a.scale != nullptr) return launch_channels<T, N, Form::scaled>(a, stream);
  if (a.slopes != nullptr) return launch_channels<T, N, Form::prelu>(a, stream);
  if (a.bias != nullptr) return launch_channels<T, N, Form::sum>(a, stream);
  launch_kernel<T, N, uint32_t, Divider32, Channels::none, Form::sum>(a, stream);
}

template <class T>
const T* advance(const void* pointer, int64_t elements) {
  return pointer == nullptr ? nullptr : static_cast<const T*>(pointer) + elements;
}

template <class T>
void launch(const BiasAct& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  // float64 is a reference type: one kernel is enough.
  const bool packed =
      sizeof(T) < 8 && a.numel % N == 0 && aligned(a.x) && aligned(a.y) && aligned(a.residual) && aligned(a.grad);
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
