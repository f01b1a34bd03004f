// xhat = (x - mean) rstd; v = xhat weight + bias; g = grad act'(v); grad_x = rstd (g weight - mean(g weight) - xhat
// mean(g weight xhat)), means over a row; grad_weight = sum of g xhat and grad_bias = sum of g over the images and the
// positions of a channel
//   x, grad, grad_x: (rows, channels, inner), a row the channels of one group of one image;  mean, rstd: (rows);
//   weight, bias: (groups, channels);  sums: (rows, channels), those of g xhat and of g over the positions of one
//   image, of which the means of a row and the gradients of weight and bias are made
//
// Limited by memory bandwidth. A block a row, which it keeps in registers, so that the data are read once; rows too
// long for that take two kernels, the second of which reads the data again. Sums are added in the same order at every
// call.
#include "add_partials.cuh"
#include "kernels.h"
#include "rows.cuh"

namespace kfc {
namespace {

// g and xhat of elements of one channel, in place of grad and x
template <int act, class T, int N, class A>
__device__ __forceinline__ void gradient_of_channel(const GroupNormBackward& a, A mean, A rstd, A weight, A bias,
                                                    A (&x)[N], A (&g)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) x[j] = (x[j] - mean) * rstd;
  if constexpr (act != kNone) {
    A v[N];
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = x[j] * weight + bias;
    activate_backward_as<act, T>(a.activation, g, v, static_cast<A>(a.slope));
  }
}

// The gradient of a row of a single element is 0; an rstd of 0 keeps rounding errors out of it.
template <class A>
__device__ __forceinline__ A rstd_of(const GroupNormBackward& a, int64_t row) {
  return a.channels * a.inner == 1 ? A(0) : static_cast<const A*>(a.rstd)[row];
}

template <class T, class A>
__device__ __forceinline__ A weight_of(const GroupNormBackward& a, int64_t channel) {
  return a.weight == nullptr ? A(1) : widen(static_cast<const T*>(a.weight)[channel]);
}

template <class T, class A>
__device__ __forceinline__ A bias_of(const GroupNormBackward& a, int64_t channel) {
  return a.bias == nullptr ? A(0) : widen(static_cast<const T*>(a.bias)[channel]);
}

// g weight (in g) and xhat become grad_x
template <class T, int N, class A>
__device__ __forceinline__ void write_grad_x(T* grad_x, A rstd, A mean_g, A mean_gx, const A (&xhat)[N], A (&g)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) g[j] = rstd * (g[j] - mean_g - xhat[j] * mean_gx);
  store<N>(grad_x, g);
}

// How a row is divided among the threads of a block: each channel is cut into `pieces` pieces of `lanes` packs, of
// which the last may have fewer; `lanes` neighbouring threads are a team, which takes the pieces team, team + teams,
// ...
struct Deal {
  int lanes;  // a power of two
  int pieces;
  int packs;  // of a channel
};

constexpr int kRowThreads = 512;
constexpr int kLeastLanes = 4;

// ITEMS packs of N elements a thread
template <int act, class T, int N, int ITEMS>
__global__ void __launch_bounds__(kRowThreads, N == 1 || act == kAny ? 1 : 2)
    group_norm_backward_kernel(GroupNormBackward a, Deal deal) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A piece_sums[2][ITEMS * kRowThreads / kLeastLanes];
  __shared__ A warp_sums[2][kRowThreads / 32];
  const int warps = blockDim.x / 32;
  const int lane = threadIdx.x % deal.lanes;
  const int team = threadIdx.x / deal.lanes;
  const int teams = blockDim.x / deal.lanes;
  const int channels = static_cast<int>(a.channels);
  const int inner = static_cast<int>(a.inner);
  const A inverse = A(1) / static_cast<A>(channels * inner);
  const int64_t row = blockIdx.x;
  const int64_t first = row * channels * inner;
  const int64_t first_channel = static_cast<int64_t>(blockIdx.x % static_cast<unsigned>(a.groups)) * channels;
  const A mean = static_cast<const A*>(a.mean)[row];
  const A rstd = rstd_of<A>(a, row);
  int at[ITEMS];  // in the row, or -1
  A weight[ITEMS];
  A bias[ITEMS];
  Pack<T, N> xs[ITEMS] = {};
  Pack<T, N> grads[ITEMS] = {};
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int piece = i * teams + team;
    const int channel = piece / deal.pieces;
    const int pack = (piece - channel * deal.pieces) * deal.lanes + lane;
    at[i] = channel < channels && pack < deal.packs ? channel * inner + pack * N : -1;
    weight[i] = bias[i] = 0;
    if (at[i] >= 0) {
      xs[i] = load_pack<Pack<T, N>>(static_cast<const T*>(a.x) + first + at[i]);
      grads[i] = load_pack<Pack<T, N>>(static_cast<const T*>(a.grad) + first + at[i]);
      weight[i] = weight_of<T, A>(a, first_channel + channel);
      if (act != kNone) bias[i] = bias_of<T, A>(a, first_channel + channel);
    }
  }
  A xhat[ITEMS][N];
  A g[ITEMS][N];               // times weight, in the end
  A totals[2] = {A(0), A(0)};  // of g * weight * xhat and of g * weight
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    A sums[2] = {A(0), A(0)};  // of g * xhat and of g
#pragma unroll
    for (int j = 0; j < N; ++j) {
      xhat[i][j] = widen(xs[i].v[j]);
      g[i][j] = widen(grads[i].v[j]);
    }
    if (at[i] >= 0) {
      gradient_of_channel<act, T>(a, mean, rstd, weight[i], bias[i], xhat[i], g[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sums[0] += g[i][j] * xhat[i][j];
        sums[1] += g[i][j];
        g[i][j] *= weight[i];
      }
    }
    for (int offset = deal.lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int k = 0; k < 2; ++k) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], offset);
    }
    if (lane == 0) {  // which has a pack of each of the team's pieces, and so its weight
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        totals[k] += weight[i] * sums[k];
        piece_sums[k][i * teams + team] = sums[k];
      }
    }
  }
  for (int offset = 16; offset >= deal.lanes; offset /= 2) {
#pragma unroll
    for (int k = 0; k < 2; ++k) totals[k] += __shfl_xor_sync(0xffffffffu, totals[k], offset);
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (threadIdx.x % 32 == 0) warp_sums[k][threadIdx.x / 32] = totals[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < 2; ++k) totals[k] = threadIdx.x % 32 < warps ? warp_sums[k][threadIdx.x % 32] : A(0);
  lane_sums<32>(totals);
  const A mean_gx = totals[0] * inverse;
  const A mean_g = totals[1] * inverse;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    if (at[i] >= 0) write_grad_x(static_cast<T*>(a.grad_x) + first + at[i], rstd, mean_g, mean_gx, xhat[i], g[i]);
  }
  for (int channel = threadIdx.x; channel < channels; channel += blockDim.x) {
    A sum_weight = 0;
    A sum_bias = 0;
#pragma unroll 4
    for (int piece = channel * deal.pieces; piece < (channel + 1) * deal.pieces; ++piece) {
      sum_weight += piece_sums[0][piece];
      sum_bias += piece_sums[1][piece];
    }
    static_cast<A*>(a.sums_weight)[row * channels + channel] = sum_weight;
    static_cast<A*>(a.sums_bias)[row * channels + channel] = sum_bias;
  }
}

// The sums of channels of any length, THREADS threads a channel
template <int act, class T, int N, int THREADS>
__global__ void __launch_bounds__(row_block(THREADS)) channel_sums_kernel(GroupNormBackward a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  constexpr int kUnroll = act == kAny || sizeof(T) == 8 ? 1 : (N == 8 ? 2 : 4);
  __shared__ A shared[64];
  const int64_t lane = threadIdx.x % THREADS;
  for_rows<THREADS>(a.rows * a.channels, [&](int64_t channel, bool active) {
    A sums[2] = {A(0), A(0)};  // of g * xhat and of g
    if (active) {
      const int64_t row = channel / a.channels;
      const int64_t of_all = channel % (a.groups * a.channels);
      const A mean = static_cast<const A*>(a.mean)[row];
      const A rstd = rstd_of<A>(a, row);
      const A weight = weight_of<T, A>(a, of_all);
      const A bias = bias_of<T, A>(a, of_all);
#pragma unroll kUnroll
      for (int64_t i = lane * N; i < a.inner; i += THREADS * N) {
        A xhat[N];
        A g[N];
        load<N>(static_cast<const T*>(a.x) + channel * a.inner + i, xhat);
        load<N>(static_cast<const T*>(a.grad) + channel * a.inner + i, g);
        gradient_of_channel<act, T>(a, mean, rstd, weight, bias, xhat, g);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          sums[0] += g[j] * xhat[j];
          sums[1] += g[j];
        }
      }
    }
    row_sums<THREADS>(sums, shared);
    if (active && lane == 0) {
      static_cast<A*>(a.sums_weight)[channel] = sums[0];
      static_cast<A*>(a.sums_bias)[channel] = sums[1];
    }
  });
}

constexpr int kPartThreads = 256;

// grad_x from the sums of the channels: a block for each part of a row, `part` elements
template <int act, class T, int N>
__global__ void __launch_bounds__(kPartThreads) grad_x_kernel(GroupNormBackward a, int64_t part, int64_t parts) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[64];
  const int64_t cols = a.channels * a.inner;
  const A inverse = A(1) / static_cast<A>(cols);
  for (int64_t block = blockIdx.x; block < a.rows * parts; block += gridDim.x) {
    const int64_t row = block / parts;
    const int64_t begin = block % parts * part;
    const int64_t end = begin + part < cols ? begin + part : cols;
    const int64_t first_channel = row % a.groups * a.channels;
    const A mean = static_cast<const A*>(a.mean)[row];
    const A rstd = rstd_of<A>(a, row);
    A means[2] = {A(0), A(0)};  // of g * weight * xhat and of g * weight
    for (int64_t c = threadIdx.x; c < a.channels; c += kPartThreads) {
      const A weight = weight_of<T, A>(a, first_channel + c);
      means[0] += weight * static_cast<const A*>(a.sums_weight)[row * a.channels + c];
      means[1] += weight * static_cast<const A*>(a.sums_bias)[row * a.channels + c];
    }
    row_sums<kPartThreads>(means, shared);
    for (int64_t col = begin + static_cast<int64_t>(threadIdx.x) * N; col < end; col += kPartThreads * N) {
      // A division of 64-bit integers for each access would cost more than the access.
      const int64_t channel = first_channel + static_cast<uint32_t>(col) / static_cast<uint32_t>(a.inner);
      const A weight = weight_of<T, A>(a, channel);
      A xhat[N];
      A g[N];
      load<N>(static_cast<const T*>(a.x) + row * cols + col, xhat);
      load<N>(static_cast<const T*>(a.grad) + row * cols + col, g);
      gradient_of_channel<act, T>(a, mean, rstd, weight, bias_of<T, A>(a, channel), xhat, g);
#pragma unroll
      for (int j = 0; j < N; ++j) g[j] *= weight;
      write_grad_x(static_cast<T*>(a.grad_x) + row * cols + col, rstd, means[1] * inverse, means[0] * inverse, xhat, g);
    }
  }
}

int64_t rounded_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

unsigned grid_of(int64_t blocks) {
  constexpr int64_t kMostBlocks = int64_t{1} << 30;
  return static_cast<unsigned>(blocks < kMostBlocks ? blocks : kMostBlocks);
}

// False where a block of `most` threads does not hold a row, or a grid not all of them.
template <class T, int N, int ITEMS>
bool launch_in_registers(const GroupNormBackward& a, int64_t most, cudaStream_t stream) {
  const int64_t packs = a.inner / N;
  constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
  if (a.rows > kMostBlocks || a.channels > most * ITEMS || packs > most * ITEMS) return false;
  int64_t lanes = 32;  // the number that leaves the fewest idle, or the largest of several such
  for (int64_t fewer = 16; fewer >= kLeastLanes; fewer /= 2) {
    if (rounded_up(packs, fewer) < rounded_up(packs, lanes)) lanes = fewer;
  }
  const int64_t pieces = rounded_up(packs, lanes) / lanes;
  const int64_t teams = rounded_up(a.channels * pieces, ITEMS) / ITEMS;
  const int64_t threads = rounded_up(teams * lanes, 32);
  if (threads > most) return false;
  const Deal deal{static_cast<int>(lanes), static_cast<int>(pieces), static_cast<int>(packs)};
  dispatch_row_activation(a.activation, [&](auto act) {
    launch_overlapped(group_norm_backward_kernel<decltype(act)::value, T, N, ITEMS>, static_cast<unsigned>(a.rows),
                      static_cast<unsigned>(threads), stream, a, deal);
  });
  return true;
}

template <class T, int N>
void launch_in_two(const GroupNormBackward& a, cudaStream_t stream) {
  constexpr int kWide = 256;
  const int64_t count = a.rows * a.channels;
  const int64_t cols = a.channels * a.inner;
  // Each block adds up the sums of a row's channels, which is to be little beside its part.
  const int64_t part = rounded_up(4 * a.channels, kPartThreads * N * 4);
  const int64_t parts = rounded_up(cols, part) / part;
  dispatch_row_activation(a.activation, [&](auto act) {
    constexpr int code = decltype(act)::value;
    if (a.inner >= 2 * kWide * N) {
      launch_overlapped(channel_sums_kernel<code, T, N, kWide>, grid_of(count), kWide, stream, a);
    } else {
      launch_overlapped(channel_sums_kernel<code, T, N, 32>, row_grid(count, row_block(32) / 32, row_block(32)),
                        row_block(32), stream, a);
    }
    launch_overlapped(grad_x_kernel<code, T, N>, grid_of(a.rows * parts), kPartThreads, stream, a, part, parts);
  });
}

template <class T>
void launch_rows(const GroupNormBackward& a, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {  // float64 is a reference type: the kernels for single elements are enough
    constexpr int N = kPackBytes / sizeof(T);
    const bool packed = aligned(a.x) && aligned(a.grad) && aligned(a.grad_x);
    if (packed && a.inner % N == 0) {
      if (launch_in_registers<T, N, 8 / N>(a, kRowThreads / 2, stream)) return;
      if (launch_in_registers<T, N, 16 / N>(a, kRowThreads, stream)) return;
      return launch_in_two<T, N>(a, stream);
    }
    // Half a pack of a half type: 14 x 14 positions are common.
    if (N == 8 && packed && a.inner % 4 == 0 && launch_in_registers<T, 4, 4>(a, kRowThreads, stream)) return;
  }
  if (launch_in_registers<T, 1, 8>(a, kRowThreads, stream)) return;
  launch_in_two<T, 1>(a, stream);
}

template <class T>
void launch(const GroupNormBackward& a, cudaStream_t stream) {
  if (a.rows > 0) launch_rows<T>(a, stream);
  const ColumnSums sums{
      {a.sums_weight, a.sums_bias}, {a.grad_weight, a.grad_bias}, a.rows / a.groups, a.groups * a.channels};
  add_partials(sums, a.dtype, stream);
}

}  // namespace

int launch_group_norm_backward(const GroupNormBackward& a, void* stream) {
  // The channel of an element is found with 32 bits.
  if (a.channels * a.inner >= int64_t{1} << 32) return cudaErrorInvalidValue;
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
