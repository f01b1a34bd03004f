// y = act(x * scale + shift), scale = weight / sqrt(variance + eps), shift = bias - mean * scale; and its backward
//   x, grad, y: (numel), one memory layout;  mean, variance, weight, bias, totals: (channels), channel of element
//   i = (i / inner) % channels
//
// Limited by memory bandwidth. Scale and shift are computed once for each thread, which has one channel or one pack of
// channels: a kernel of their own would take as long as this one of a small image. That is done in double, but for the
// half types, of whose rounding float has enough digits less.
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

// What belongs to the channels from `channel` on, computed in W; P is the dtype of the parameters.
template <class W, class P, int N, class A>
__device__ __forceinline__ ScaleAndShift<A, N> fold(const BatchNormAct& a, int64_t channel, int step) {
  ScaleAndShift<A, N> own;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (j > 0 && step == 0) {
      own.scale[j] = own.scale[0];
      own.shift[j] = own.shift[0];
      own.mean[j] = own.mean[0];
      own.rstd[j] = own.rstd[0];
      continue;
    }
    const auto read = [&](const void* values, W otherwise) {
      return values == nullptr ? otherwise : static_cast<W>(widen(static_cast<const P*>(values)[channel + j]));
    };
    const W mean = read(a.mean, W(0));
    const W rstd = rsqrt(read(a.variance, W(0)) + static_cast<W>(a.eps));
    const W scale = read(a.weight, W(1)) * rstd;
    own.scale[j] = static_cast<A>(scale);
    own.shift[j] = static_cast<A>(read(a.bias, W(0)) - mean * scale);
    own.mean[j] = static_cast<A>(mean);
    own.rstd[j] = static_cast<A>(rstd);
  }
  return own;
}

template <class T, int N, class A>
__device__ __forceinline__ ScaleAndShift<A, N> fold_channels(const BatchNormAct& a, int64_t channel, int step) {
  using W = std::conditional_t<sizeof(T) == 2, float, double>;
  if (sizeof(T) == 2 && a.dtype == DType::f32) return fold<W, float, N, A>(a, channel, step);
  return fold<W, T, N, A>(a, channel, step);
}

template <class T>
struct BatchNormForward {
  using A = typename Accumulate<T>::type;
  static constexpr int kTotals = 0;
  static constexpr int kBlocks = 3;
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
    activate_pack<T>(a.terms.activation, v, static_cast<A>(a.terms.slope));
    store<N>(static_cast<T*>(a.terms.y) + at, v);
  }
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
  return launch_gradients<BatchNormForward>(a, a.terms, none, stream);
}

int64_t batch_norm_shares(const BatchNormAct& a) { return shares_of(a.terms, kGradientBlocks); }

int launch_batch_norm_act_gradients(const BatchNormAct& a, const ChannelTotals& sums, void* stream) {
  if (a.terms.activation == kRelu)
    return launch_gradients<BatchNormGradients<kRelu>::template For>(a, a.terms, sums, stream);
  return launch_gradients<BatchNormGradients<kAny>::template For>(a, a.terms, sums, stream);
}

}  // namespace kfc
