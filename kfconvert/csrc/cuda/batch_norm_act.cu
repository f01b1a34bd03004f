// y = act(x * scale + shift), scale = weight / sqrt(variance + eps), shift = bias - mean * scale; and its backward
//   x, grad, y: (numel), one memory layout;  mean, variance, weight, bias, totals: (channels), channel of element
//   i = (i / inner) % channels
//
// Limited by memory bandwidth. Scale and shift are computed once for each thread, which has one channel or one pack of
// channels: a kernel of their own would take as long as this one of a small image.
#include "channel_totals.cuh"
#include "kernels.h"

namespace kfc {
namespace {

constexpr int kGradientBlocks = 3;
// As many blocks as there are packs for, up to the limit of a grid for each channel.
constexpr int64_t kForwardBlocks = 64;
constexpr int64_t kMostShares = 65535;

template <class A, int N>
struct ScaleAndShift {
  A scale[N];
  A shift[N];
  A mean[N];
  A rstd[N];
};

// As exact as the dtype of x asks for.
template <class T, class A>
__device__ __forceinline__ A reciprocal_root(A v) {
  if constexpr (sizeof(T) == 4) {
    return __frsqrt_rn(v);
  } else {
    return rsqrt(v);
  }
}

// Of the N channels from `channel` on, or, where step is 0, N times of that channel. A pack of channels is read in one
// access where it can be: most threads have no more than one pack of elements to use it for.
template <class P, int N, class A>
__device__ __forceinline__ void read_channels(const void* values, int64_t channel, int step, A otherwise, A (&to)[N]) {
  const P* from = static_cast<const P*>(values) + channel;
  if (values == nullptr) {
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = otherwise;
  } else if (N > 1 && step == 1 && reinterpret_cast<uintptr_t>(values) % kPackBytes == 0) {
    load_wide<N>(from, to);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = j > 0 && step == 0 ? to[0] : widen(from[j]);
  }
}

// What belongs to those channels; P is the dtype of the parameters. The shift takes the rounded scale, so that both
// have the same error and it cancels where x is close to the mean.
template <class T, class P, int N, class A>
__device__ __forceinline__ ScaleAndShift<A, N> fold(const BatchNormAct& a, int64_t channel, int step) {
  ScaleAndShift<A, N> own;
  A weight[N];
  A bias[N];
  read_channels<P>(a.variance, channel, step, A(0), own.rstd);
  read_channels<P>(a.mean, channel, step, A(0), own.mean);
  read_channels<P>(a.weight, channel, step, A(1), weight);
  read_channels<P>(a.bias, channel, step, A(0), bias);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    own.rstd[j] = j > 0 && step == 0 ? own.rstd[0] : reciprocal_root<T>(own.rstd[j] + static_cast<A>(a.eps));
    own.scale[j] = weight[j] * own.rstd[j];
    own.shift[j] = fma(-own.mean[j], own.scale[j], bias[j]);
  }
  return own;
}

template <class T, int N, class A>
__device__ __forceinline__ ScaleAndShift<A, N> fold_channels(const BatchNormAct& a, int64_t channel, int step) {
  if (sizeof(T) == 2 && a.dtype == DType::f32) return fold<T, float, N, A>(a, channel, step);
  return fold<T, T, N, A>(a, channel, step);
}

template <int act>
struct BatchNormForward {
  template <class T>
  struct For {
    using A = typename Accumulate<T>::type;
    static constexpr int kTotals = 0;
    static constexpr int kBlocks = act == kAny ? 3 : 5;
    BatchNormAct a;

    template <int N>
    __device__ ScaleAndShift<A, N> values_of_channels(int64_t channel, int step) const {
      return fold_channels<T, N, A>(a, channel, step);
    }

    template <int N>
    __device__ __forceinline__ void add(int64_t at, const ScaleAndShift<A, N>& own, A (&)[1][N]) const {
      A v[N];
      load<N>(static_cast<const T*>(a.terms.x) + at, v);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = v[j] * own.scale[j] + own.shift[j];
      if constexpr (act == kAny) {
        activate_pack<T>(a.terms.activation, v, static_cast<A>(a.terms.slope));
      } else {
        activate_as<act, T>(act, v, A(0));
      }
      store<N>(static_cast<T*>(a.terms.y) + at, v);
    }
  };
};

template <int act>
struct BatchNormGradients {
  template <class T>
  struct For {
    using A = typename Accumulate<T>::type;
    static constexpr int kTotals = 2;
    static constexpr int kBlocks = kGradientBlocks;
    BatchNormAct a;

    template <int N>
    __device__ ScaleAndShift<A, N> values_of_channels(int64_t channel, int step) const {
      return fold_channels<T, N, A>(a, channel, step);
    }

    template <int N>
    __device__ __forceinline__ void add(int64_t at, const ScaleAndShift<A, N>& own, A (&totals)[kTotals][N]) const {
      A g[N];
      A x[N];
      A v[N];
      load<N>(static_cast<const T*>(a.terms.grad) + at, g);
      load<N>(static_cast<const T*>(a.terms.x) + at, x);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = x[j] * own.scale[j] + own.shift[j];
      activate_backward_as<act, T>(a.terms.activation, g, v, static_cast<A>(a.terms.slope));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        totals[0][j] += g[j] * ((x[j] - own.mean[j]) * own.rstd[j]);
        totals[1][j] += g[j];
        g[j] *= own.scale[j];
      }
      store<N>(static_cast<T*>(a.terms.y) + at, g);
    }
  };
};

}  // namespace

int launch_batch_norm_act(const BatchNormAct& a, void* stream) {
  ChannelTotals none{};
  const int64_t shares = shares_of(a.terms, kForwardBlocks);
  none.shares = shares < kMostShares ? shares : kMostShares;
  const auto launch = [&](auto act) {
    return launch_gradients<BatchNormForward<decltype(act)::value>::template For>(a, a.terms, none, stream);
  };
  if (a.terms.activation == kNone) return launch(std::integral_constant<int, kNone>());
  if (a.terms.activation == kRelu) return launch(std::integral_constant<int, kRelu>());
  return launch(std::integral_constant<int, kAny>());
}

int64_t channel_shares(const BatchNormAct& a) { return shares_of(a.terms, kGradientBlocks); }

int launch_batch_norm_act_gradients(const BatchNormAct& a, const ChannelTotals& sums, void* stream) {
  if (a.terms.activation == kRelu)
    return launch_gradients<BatchNormGradients<kRelu>::template For>(a, a.terms, sums, stream);
  return launch_gradients<BatchNormGradients<kAny>::template For>(a, a.terms, sums, stream);
}

}  // namespace kfc
