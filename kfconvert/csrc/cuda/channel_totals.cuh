// Backward passes that write a gradient for each element and add up what belongs to channels, in one pass over memory:
// the channel of element i is (i / inner) % channels
//
// A gradient is a functor; kBlocks of its blocks fit on a multiprocessor. So many have enough loads in flight, and
// every further block would write one more row of partial sums. `values_of_channels` reads what belongs to N channels,
// `add` computes the elements at to at + N - 1, stores what is to be stored and adds their terms to totals[k][j], k
// less than kTotals. Threads keep the totals of their channels in registers; a block writes one row of partial sums at
// its end, which a second kernel adds up. Without totals it is a forward pass, whose values of channels take more than
// a read.
#pragma once

#include "add_partials.cuh"
#include "elementwise.cuh"

namespace kfc {
namespace {

constexpr int kMostLanes = 32;

// to[j] = from[channel + j * step], or 0 without channel values; step: 1, or 0 where all elements are of one channel
template <int N, class P, class A>
__device__ __forceinline__ void gather(const void* from, int64_t channel, int step, A (&to)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] = from == nullptr ? A(0) : widen(static_cast<const P*>(from)[channel + j * step]);
}

// The sums of a block of groups of `lanes` threads, each group with the same channels: `channel` to channel + N - 1 for
// this thread.
template <int TOTALS, int N, class A>
__device__ __forceinline__ void leave_columns(const ChannelTotals& sums, int64_t channel, int64_t channels, int lanes,
                                              const A (&totals)[TOTALS][N]) {
  __shared__ A shared[TOTALS * N][kThreads];
  const int group = threadIdx.x / lanes;
#pragma unroll
  for (int k = 0; k < TOTALS; ++k) {
#pragma unroll
    for (int j = 0; j < N; ++j) shared[k * N + j][threadIdx.x] = totals[k][j];
  }
  for (int half = kThreads / lanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (group >= half) continue;
#pragma unroll
    for (int k = 0; k < TOTALS * N; ++k) shared[k][threadIdx.x] += shared[k][threadIdx.x + half * lanes];
  }
  if (group > 0 || channel >= channels) return;
#pragma unroll
  for (int k = 0; k < TOTALS; ++k) {
    A total[N];
#pragma unroll
    for (int j = 0; j < N; ++j) total[j] = shared[k * N + j][threadIdx.x];
    store_wide<N>(static_cast<A*>(sums.partials[k]) + blockIdx.y * channels + channel, total);
  }
}

// The sums of a block of which all threads have the same channel.
template <int TOTALS, int N, class A>
__device__ __forceinline__ void leave_plane(const ChannelTotals& sums, int64_t channel, int64_t channels,
                                            const A (&totals)[TOTALS][N]) {
  __shared__ A shared[32 * TOTALS];
  A total[TOTALS] = {};
#pragma unroll
  for (int k = 0; k < TOTALS; ++k) {
#pragma unroll
    for (int j = 0; j < N; ++j) total[k] += totals[k][j];
  }
  row_sums<kThreads>(total, shared);
  if (threadIdx.x > 0) return;
#pragma unroll
  for (int k = 0; k < TOTALS; ++k) static_cast<A*>(sums.partials[k])[blockIdx.y * channels + channel] = total[k];
}

// inner = 1: a block has `lanes` packs of channels, each of them kThreads / lanes times.
template <class Gradient, int N>
__global__ void __launch_bounds__(kThreads, Gradient::kBlocks)
    columns_kernel(Gradient gradient, ChannelTotals sums, int64_t rows, int64_t channels, int lanes) {
  wait_for_previous_kernel();
  const int groups = kThreads / lanes;
  const int64_t channel = (static_cast<int64_t>(blockIdx.x) * lanes + threadIdx.x % lanes) * N;
  typename Gradient::A totals[Gradient::kTotals > 0 ? Gradient::kTotals : 1][N] = {};
  if (channel < channels) {
    const auto own = gradient.template values_of_channels<N>(channel, 1);
    const int64_t step = static_cast<int64_t>(gridDim.y) * groups;
    for (int64_t row = static_cast<int64_t>(blockIdx.y) * groups + threadIdx.x / lanes; row < rows; row += step) {
      gradient.template add<N>(row * channels + channel, own, totals);
    }
  }
  if constexpr (Gradient::kTotals > 0) leave_columns(sums, channel, channels, lanes, totals);
}

// inner > 1: a block is a share of the packs of one channel, of which each plane has `per_plane`.
template <class Gradient, int N, class Index, class Divider>
__global__ void __launch_bounds__(kThreads, Gradient::kBlocks)
    planes_kernel(Gradient gradient, ChannelTotals sums, Index packs, int64_t inner, Divider per_plane) {
  wait_for_previous_kernel();
  const int64_t channel = blockIdx.x;
  const int64_t channels = gridDim.x;
  const auto own = gradient.template values_of_channels<N>(channel, 0);
  typename Gradient::A totals[Gradient::kTotals > 0 ? Gradient::kTotals : 1][N] = {};
  const Index step = static_cast<Index>(gridDim.y) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.y) * kThreads + threadIdx.x; i < packs; i += step) {
    const Index plane = per_plane.divide(i);
    const Index rest = i - plane * static_cast<Index>(per_plane.divisor);
    gradient.template add<N>((plane * channels + channel) * inner + static_cast<int64_t>(rest) * N, own, totals);
  }
  if constexpr (Gradient::kTotals > 0) leave_plane(sums, channel, channels, totals);
}

// As one channel all elements are one plane.
inline int64_t inner_of(const BiasAct& a) { return a.channels == 1 ? a.numel : a.inner; }

inline int lanes_for(int64_t packs) {
  int lanes = 1;
  while (lanes < packs && lanes < kMostLanes) lanes *= 2;
  return lanes;
}

template <class Gradient, int N, class Index, class Divider>
void launch_gradient(const Gradient& gradient, const BiasAct& a, const ChannelTotals& sums, cudaStream_t stream) {
  const unsigned shares = static_cast<unsigned>(sums.shares);
  const int64_t inner = inner_of(a);
  if (inner == 1) {
    const int lanes = lanes_for(a.channels / N);
    const int64_t per_block = int64_t{N} * lanes;
    const dim3 grid(static_cast<unsigned>((a.channels + per_block - 1) / per_block), shares);
    return launch_overlapped(columns_kernel<Gradient, N>, grid, kThreads, stream, gradient, sums, a.numel / a.channels,
                             a.channels, lanes);
  }
  launch_overlapped(planes_kernel<Gradient, N, Index, Divider>, dim3(static_cast<unsigned>(a.channels), shares),
                    kThreads, stream, gradient, sums, static_cast<Index>(a.numel / a.channels / N), inner,
                    Divider(inner / N));
}

// Into how many shares the elements of each channel are divided for a grid of `blocks` blocks a multiprocessor; each
// block takes one share.
inline int64_t shares_of(const BiasAct& a, int64_t blocks) {
  if (a.numel == 0) return 0;
  const int64_t pack = a.dtype == DType::f64 ? 1 : a.dtype == DType::f32 ? 4 : 8;
  const int64_t each = a.numel / a.channels;
  int64_t wanted;
  int64_t most;
  if (inner_of(a) == 1) {
    const int64_t packs = (a.channels + pack - 1) / pack;
    const int lanes = lanes_for(packs);
    const int groups = kThreads / lanes;
    wanted = blocks * multiprocessors() / ((packs + lanes - 1) / lanes);
    most = (each + groups - 1) / groups;
  } else {
    wanted = blocks * multiprocessors() / a.channels;
    most = (each + kThreads * pack - 1) / (kThreads * pack);
  }
  const int64_t shares = wanted < most ? wanted : most;
  return shares < 1 ? 1 : shares;
}

// All of a backward pass; Gradient<T> is made of `arguments`, in which `a` has the sizes and pointers.
template <template <class> class Gradient, class Arguments>
int launch_gradients(const Arguments& arguments, const BiasAct& a, const ChannelTotals& sums, void* raw_stream) {
  const cudaStream_t stream = static_cast<cudaStream_t>(raw_stream);
  KFC_DISPATCH_DTYPE(a.dtype, {
    const Gradient<T> gradient{arguments};
    constexpr int N = kPackBytes / sizeof(T);
    const int64_t inner = inner_of(a);
    // float64 is a reference type: one kernel is enough.
    const bool packed = sizeof(T) < 8 && (inner == 1 ? a.channels : inner) % N == 0 &&
                        a.numel / a.channels <= kMostElements && aligned(a.x) && aligned(a.y) && aligned(a.residual) &&
                        aligned(a.grad);
    if (a.numel == 0) {
      // No share: the sums are 0.
    } else if (packed) {
      if constexpr (sizeof(T) < 8) launch_gradient<Gradient<T>, N, uint32_t, Divider32>(gradient, a, sums, stream);
    } else {
      launch_gradient<Gradient<T>, 1, uint64_t, Divider64>(gradient, a, sums, stream);
    }
  });
  if (sums.totals[0] == nullptr) return cudaGetLastError();
  const ColumnSums partials{
      {sums.partials[0], sums.partials[1]}, {sums.totals[0], sums.totals[1]}, sums.shares, a.channels};
  add_partials(partials, sums.dtype, stream);
  return cudaGetLastError();
}

}  // namespace
}  // namespace kfc
