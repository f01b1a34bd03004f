// s = x + residual; y = act((s - mean) / sqrt(mean((s - mean)^2) + eps) * (weight + offset) + bias)
// CENTRED: mean = mean(s), a layer norm; else mean = 0, an RMS norm.
//   x, y, sum: (rows, cols);  residual: (residual_rows, cols), repeated;  weight, bias: (cols);  mean, rstd:
//   (rows)
//
// Limited by memory bandwidth: a row is read once into registers, its mean and its centred variance are taken
// there in two passes, and it is written once. Rows that do not fit, and those of half types with weights of float, are
// read three times (an RMS norm's twice), mostly from L2.
//
// A layer norm whose sum and statistics are kept for a backward is one of the sum as stored: the backward subtracts
// the mean from that, and the mean of another row would be all that is left of a row of almost equal values.
#include "kernels.h"
#include "norm_rows.cuh"

namespace kfc {
namespace {

template <bool CENTRED, class T, int N, class A>
__device__ __forceinline__ void round_as_stored(const LayerNorm& a, A (&s)[N]) {
  if (!CENTRED || sizeof(T) != 2 || a.sum == nullptr || a.rstd == nullptr) return;
#pragma unroll
  for (int j = 0; j < N; ++j) s[j] = widen(narrow<T>(s[j]));
}

template <class T, int N, class A>
__device__ __forceinline__ void load_sum(const LayerNorm& a, int64_t row, int64_t residual_row, int64_t col,
                                         A (&s)[N]) {
  load<N>(static_cast<const T*>(a.x) + row * a.cols + col, s);
  if (a.residual != nullptr) {
    A other[N];
    load<N>(static_cast<const T*>(a.residual) + residual_row * a.cols + col, other);
#pragma unroll
    for (int j = 0; j < N; ++j) s[j] += other[j];
  }
}

// A division of 64-bit integers costs as much as a small row: only where the residual is repeated.
__device__ __forceinline__ int64_t residual_row_of(const LayerNorm& a, int64_t row) {
  return a.residual_rows == a.rows || a.residual == nullptr ? row : row % a.residual_rows;
}

template <class A>
__device__ __forceinline__ void write_statistics(const LayerNorm& a, int64_t row, RowMoments<A> moments) {
  if (a.mean != nullptr) static_cast<A*>(a.mean)[row] = moments.mean;
  if (a.rstd != nullptr) static_cast<A*>(a.rstd)[row] = moments.rstd;
}

// THREADS threads hold a row of at most THREADS * ITEMS packs of N elements.
template <bool CENTRED, int act, class T, int N, int THREADS, int ITEMS, bool EARLY>
__global__ void __launch_bounds__(row_block(THREADS), kNormBlocks<THREADS, EARLY>)
    layer_norm_kernel(LayerNorm a, NormScalarsOf<T> norm) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  constexpr int kBlock = row_block(THREADS);
  constexpr int kRows = kBlock / THREADS;
  __shared__ A shared[kMomentValues];
  const int lane = threadIdx.x % THREADS;
  const RowAffine<CENTRED, T, N, THREADS, ITEMS, EARLY> affine(a, norm);
  // All threads of a block make the same number of turns: the sums need every one of them.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < a.rows;
       first += static_cast<int64_t>(gridDim.x) * kRows) {
    const int64_t row = first + threadIdx.x / THREADS;
    const int64_t residual_row = residual_row_of(a, row);
    const bool active = row < a.rows;
    RowWords<T, N, ITEMS> x;
    RowWords<T, N, ITEMS> residual;
    x.template load<THREADS>(static_cast<const T*>(a.x) + row * a.cols, a.cols, active);
    residual.template load<THREADS>(static_cast<const T*>(a.residual) + residual_row * a.cols, a.cols,
                                    active && a.residual != nullptr);
    A s[ITEMS][N];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      x.get(i, s[i]);
      if (a.residual != nullptr) residual.add_to(i, s[i]);
    }
    if (a.sum != nullptr) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int col = (i * THREADS + lane) * N;
        if (active && col < a.cols) store<N>(static_cast<T*>(a.sum) + row * a.cols + col, s[i]);
        round_as_stored<CENTRED, T>(a, s[i]);
      }
    }
    const RowMoments<A> moments = moments_of<CENTRED, THREADS>(s, a.cols, norm, active, shared);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = (i * THREADS + lane) * N;
      if (active && col < a.cols) {
        write_pack<act, T>(a, row, col, moments, norm.slope, s[i], [&](A(&v)[N]) { affine.apply(i, v); });
      }
    }
    if (active && lane == 0) write_statistics(a, row, moments);
  }
}

// A block a row, of any length.
template <bool CENTRED, int act, class T, int N, int THREADS>
__global__ void __launch_bounds__(THREADS) layer_norm_long_kernel(LayerNorm a, NormScalarsOf<T> norm) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[32];
  const int64_t start = static_cast<int64_t>(threadIdx.x) * N;
  constexpr int64_t kStep = static_cast<int64_t>(THREADS) * N;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t residual_row = residual_row_of(a, row);
    A s[N];
    const auto load = [&](int64_t col, A(&to)[N]) {
      load_sum<T>(a, row, residual_row, col, to);
      round_as_stored<CENTRED, T>(a, to);
    };
    if (a.sum != nullptr) {
      for (int64_t col = start; col < a.cols; col += kStep) {
        load(col, s);
        store<N>(static_cast<T*>(a.sum) + row * a.cols + col, s);
      }
    }
    const RowMoments<A> moments = moments_of_long_row<CENTRED, THREADS, N>(load, a.cols, norm, shared);
    for (int64_t col = start; col < a.cols; col += kStep) {
      load(col, s);
      write_pack<act, T>(a, row, col, moments, norm.slope, s, [&](A(&v)[N]) { apply_affine<T>(a, col, v); });
    }
    if (threadIdx.x == 0) write_statistics(a, row, moments);
  }
}

template <class T, int N, int THREADS, int ITEMS, bool EARLY>
void launch_rows(const LayerNorm& a, cudaStream_t stream) {
  constexpr int kBlock = row_block(THREADS);
  const unsigned grid = row_grid(a.rows, kBlock / THREADS, kBlock);
  dispatch_row_activation(a.activation, [&](auto act) {
    constexpr int kAct = decltype(act)::value;
    // Models do not activate an RMS norm, and each kernel takes compile time.
    constexpr int kRms = kAct == kNone ? kNone : kAny;
    const auto kernel = a.centred ? layer_norm_kernel<true, kAct, T, N, THREADS, ITEMS, EARLY>
                                  : layer_norm_kernel<false, kRms, T, N, THREADS, ITEMS, EARLY>;
    launch_overlapped(kernel, grid, kBlock, stream, a, NormScalarsOf<T>(a));
  });
}

template <class T, int N, int THREADS>
void launch_long(const LayerNorm& a, cudaStream_t stream) {
  const unsigned grid = row_grid(a.rows, 1, THREADS);
  const auto kernel = a.centred ? layer_norm_long_kernel<true, kAny, T, N, THREADS>
                                : layer_norm_long_kernel<false, kAny, T, N, THREADS>;
  launch_overlapped(kernel, grid, THREADS, stream, a, NormScalarsOf<T>(a));
}

template <class T>
void launch(const LayerNorm& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const bool packed = a.cols % N == 0 && aligned(a.x) && aligned(a.y) && aligned(a.residual) && aligned(a.sum) &&
                      aligned(a.weight) && aligned(a.bias);
  const bool own = has_own_affine<T>(a);
  if (!packed) {
    if (own && a.cols <= 128) return launch_rows<T, 1, 32, 4, false>(a, stream);
    return launch_long<T, 1, 256>(a, stream);
  }
  // Reference types and rare ones: one kernel is enough.
  if (sizeof(T) == 8 || !own) return launch_long<T, N, 256>(a, stream);
  if constexpr (sizeof(T) < 8) {
    dispatch_rows<N>(
        a.cols / N, a.rows, [&](auto shape) { launch_rows<T, N, shape.threads, shape.items, shape.early>(a, stream); },
        [&] { launch_long<T, N, 1024>(a, stream); });
  }
}

}  // namespace

int launch_layer_norm(const LayerNorm& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
