// y = dropout(act(x + bias)) + residual, or with grad: y = dropout(grad) * act'(x + bias)
//   x, residual, grad, y: (numel), one memory layout;  bias: (channels), channel of element i = (i / inner) % channels
//
// Which elements are dropped follows from their number, a seed and a sequence alone, so that no mask is written. In a
// captured graph these are read from the device, where each replay draws new ones. Limited by memory bandwidth; the
// random words cost 50 integer instructions for each four elements.
#include "dropout.cuh"
#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

template <class T, int N, class Index, class Divider, Channels kind, int act, bool backward>
__global__ void __launch_bounds__(kThreads) dropout_act_kernel(DropoutAct a, Divider inner, Divider channels) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  using P = Pack<T, N>;
  constexpr bool kReadsX = !backward || act != kNone;
  const T* x = static_cast<const T*>(a.terms.x);
  const T* bias = static_cast<const T*>(a.terms.bias);
  // The gradient, or the residual where there is one.
  const T* second = static_cast<const T*>(backward ? a.terms.grad : a.terms.residual);
  T* y = static_cast<T*>(a.terms.y);
  const A slope = static_cast<A>(a.terms.slope);
  const DropoutState state(a);
  const Index packs = static_cast<Index>(a.terms.numel / N);
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < packs; i += step) {
    const Index at = i * N;
    // Both are asked for before either is waited for.
    Word<P> x_word{};
    Word<P> second_word{};
    if constexpr (kReadsX) x_word = load_word<P>(x + at);
    if (backward || second != nullptr) second_word = load_word<P>(second + at);
    A v[N];
    A other[N];
    widen_word<T>(x_word, v);
    widen_word<T>(second_word, other);
    if constexpr (kReadsX) add_channels<kind>(bias, at, inner, channels, v);
    if constexpr (backward) {
      drop<N>(a, state, at, other);
      // The derivatives of all activations from their inputs: the outputs were not kept.
      activate_backward_as<act, T>(a.terms.activation, other, v, slope);
      store<N>(y + at, other);
    } else {
      activate_as<act, T>(a.terms.activation, v, slope);
      drop<N>(a, state, at, v);
      if (second != nullptr) {  // adding 0 would make 0 of -0
#pragma unroll
        for (int j = 0; j < N; ++j) v[j] += other[j];
      }
      store<N>(y + at, v);
    }
  }
}

template <class T, int N, class Index, class Divider, Channels kind, int act>
void launch_kernel(const DropoutAct& a, cudaStream_t stream) {
  const auto kernel = a.terms.grad != nullptr ? dropout_act_kernel<T, N, Index, Divider, kind, act, true>
                                              : dropout_act_kernel<T, N, Index, Divider, kind, act, false>;
  launch_overlapped(kernel, elementwise_grid(a.terms.numel / N), kThreads, stream, a, Divider(a.terms.inner),
                    Divider(a.terms.channels));
}

// What gelu_dropout and bias_dropout_add have, has kernels of its own.
template <class T, int N, Channels kind>
void launch_packs(const DropoutAct& a, cudaStream_t stream) {
  if (a.terms.activation == kNone) return launch_kernel<T, N, uint32_t, Divider32, kind, kNone>(a, stream);
  if (a.terms.activation == kGelu) return launch_kernel<T, N, uint32_t, Divider32, kind, kGelu>(a, stream);
  launch_kernel<T, N, uint32_t, Divider32, kind, kAny>(a, stream);
}

template <class T>
void launch(const DropoutAct& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const BiasAct& terms = a.terms;
  // float64 is a reference type: one kernel is enough.
  if constexpr (sizeof(T) < 8) {
    const bool packed = terms.numel % N == 0 && terms.numel <= kMostElements && aligned(terms.x) && aligned(terms.y) &&
                        aligned(terms.residual) && aligned(terms.grad);
    if (packed && terms.bias == nullptr) return launch_packs<T, N, Channels::none>(a, stream);
    if (packed) {
      return dispatch_channels<N>(terms.inner, terms.channels, {terms.bias},
                                  [&](auto kind) { launch_packs<T, N, kind()>(a, stream); });
    }
  }
  if (terms.bias == nullptr) return launch_kernel<T, 1, uint64_t, Divider64, Channels::none, kAny>(a, stream);
  launch_kernel<T, 1, uint64_t, Divider64, Channels::lanes, kAny>(a, stream);
}

}  // namespace

int launch_dropout_act(const DropoutAct& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.terms.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
