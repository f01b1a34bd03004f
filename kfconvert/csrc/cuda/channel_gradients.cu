// The backward passes of bias_act, prelu_bias and dropout_act together with the sums by channel that are the gradients
// of bias and slopes
//   x, residual, grad, y: (numel), one memory layout;  bias, slopes, totals: (channels), channel of element
//   i = (i / inner) % channels
//
// Limited by memory bandwidth: the sums cost no pass of their own.
#include "channel_totals.cuh"
#include "dropout.cuh"
#include "kernels.h"

namespace kfc {
namespace {

constexpr int kBlocksOfAll = 4;

template <class A, int N>
struct BiasOf {
  A bias[N];
};

// y = grad * act'(x + bias + residual), its sum is the gradient of bias. Without y the activation is none, and y would
// be grad.
template <int act>
struct BiasActGradients {
  template <class T>
  struct For {
    using A = typename Accumulate<T>::type;
    static constexpr int kTotals = 1;
    static constexpr int kBlocks = kBlocksOfAll;
    BiasAct a;

    template <int N>
    __device__ BiasOf<A, N> values_of_channels(int64_t channel, int step) const {
      BiasOf<A, N> own;
      gather<N, T>(a.bias, channel, step, own.bias);
      return own;
    }

    template <int N>
    __device__ __forceinline__ void add(int64_t at, const BiasOf<A, N>& own, A (&totals)[kTotals][N]) const {
      A g[N];
      load<N>(static_cast<const T*>(a.grad) + at, g);
      if constexpr (act != kNone) {
        A v[N];
        load<N>(static_cast<const T*>(a.x) + at, v);
#pragma unroll
        for (int j = 0; j < N; ++j) v[j] += own.bias[j];
        if (a.residual != nullptr) {
          A other[N];
          load<N>(static_cast<const T*>(a.residual) + at, other);
#pragma unroll
          for (int j = 0; j < N; ++j) v[j] += other[j];
        }
        const A slope = static_cast<A>(a.slope);
        if constexpr (act != kAny) {
          activate_backward_each<static_cast<Act>(act), typename MathFor<T>::type>(g, v, slope);
        } else {
          activate_backward_pack<T>(a.activation, g, v, slope);
        }
        store<N>(static_cast<T*>(a.y) + at, v);
#pragma unroll
        for (int j = 0; j < N; ++j) g[j] = v[j];
      }
#pragma unroll
      for (int j = 0; j < N; ++j) totals[0][j] += g[j];
    }
  };
};

template <class A, int N>
struct BiasAndSlopes {
  A bias[N];
  A slopes[N];
};

// v = x + bias; y = grad where v is positive, else grad * slope, and its sum is the gradient of bias; grad * v, where v
// is not positive, is that of the slopes.
template <class T>
struct PreluGradient {
  using A = typename Accumulate<T>::type;
  static constexpr int kTotals = 2;
  static constexpr int kBlocks = kBlocksOfAll;
  BiasAct a;

  template <int N>
  __device__ BiasAndSlopes<A, N> values_of_channels(int64_t channel, int step) const {
    BiasAndSlopes<A, N> own;
    gather<N, T>(a.bias, channel, step, own.bias);
    gather<N, T>(a.slopes, channel, step, own.slopes);
    return own;
  }

  template <int N>
  __device__ __forceinline__ void add(int64_t at, const BiasAndSlopes<A, N>& own, A (&totals)[kTotals][N]) const {
    A g[N];
    A v[N];
    load<N>(static_cast<const T*>(a.grad) + at, g);
    load<N>(static_cast<const T*>(a.x) + at, v);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      v[j] += own.bias[j];
      const bool positive = v[j] > A(0);
      totals[1][j] += positive ? A(0) : g[j] * v[j];
      g[j] = positive ? g[j] : g[j] * own.slopes[j];
      totals[0][j] += g[j];
    }
    store<N>(static_cast<T*>(a.y) + at, g);
  }
};

// y = dropout(grad) * act'(x + bias), its sum is the gradient of bias.
template <class T>
struct DropoutActGradient {
  using A = typename Accumulate<T>::type;
  static constexpr int kTotals = 1;
  static constexpr int kBlocks = kBlocksOfAll;
  DropoutAct a;

  // The state is read for each channel, and so after the kernels ahead have ended.
  template <int N>
  struct Channels {
    A bias[N];
    DropoutState state;
  };

  template <int N>
  __device__ Channels<N> values_of_channels(int64_t channel, int step) const {
    Channels<N> own{{}, DropoutState(a)};
    gather<N, T>(a.terms.bias, channel, step, own.bias);
    return own;
  }

  template <int N>
  __device__ __forceinline__ void add(int64_t at, const Channels<N>& own, A (&totals)[kTotals][N]) const {
    A g[N];
    load<N>(static_cast<const T*>(a.terms.grad) + at, g);
    if (a.terms.activation != kNone) {
      A v[N];
      load<N>(static_cast<const T*>(a.terms.x) + at, v);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] += own.bias[j];
      activate_backward_as<kAny, T>(a.terms.activation, g, v, static_cast<A>(a.terms.slope));
    }
    drop<N>(a, own.state, static_cast<uint64_t>(at), g);
    store<N>(static_cast<T*>(a.terms.y) + at, g);
#pragma unroll
    for (int j = 0; j < N; ++j) totals[0][j] += g[j];
  }
};

}  // namespace

int64_t channel_shares(const BiasAct& a) { return shares_of(a, kBlocksOfAll); }

int launch_bias_act_gradients(const BiasAct& a, const ChannelTotals& sums, void* stream) {
  if (a.slopes != nullptr) return launch_gradients<PreluGradient>(a, a, sums, stream);
  int error = cudaSuccess;
  dispatch_row_activation(a.activation, [&](auto act) {
    error = launch_gradients<BiasActGradients<decltype(act)::value>::template For>(a, a, sums, stream);
  });
  return error;
}

int launch_dropout_act_gradients(const DropoutAct& a, const ChannelTotals& sums, void* stream) {
  return launch_gradients<DropoutActGradient>(a, a.terms, sums, stream);
}

}  // namespace kfc
