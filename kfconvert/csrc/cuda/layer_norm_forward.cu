// s = x + residual; y = act((s - mean) / sqrt(mean((s - mean)^2) + eps) * (weight + offset) + bias)
// CENTRED: mean = mean(s), a layer norm; else mean = 0, an RMS norm.
//   x, y, sum: (rows, cols);  residual: (residual_rows, cols), repeated;  weight, bias: (cols);  mean, rstd:
//   (rows)
//
// Limited by memory bandwidth: a row is read once into registers, its mean and its centred variance are taken
// there in two passes, and it is written once. Rows that do not fit are read three
// times (an RMS norm's twice), mostly from L2.
#include "kernels.h"
#include "rows.cuh"

namespace kfc {
namespace {

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

template <int act, class T, int N, class A>
__device__ __forceinline__ void write_pack(const LayerNorm& a, int64_t row, int64_t col, A mean, A rstd,
                                           const A (&s)[N]) {
  A v[N];
  A other[N];
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = (s[j] - mean) * rstd;
  if (a.weight != nullptr) {
    load_weight<N, T>(a, col, other);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] *= other[j];
  }
  if (a.bias != nullptr) {
    load_affine<N, T>(a.bias, a.affine_dtype == DType::f32, col, other);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] += other[j];
  }
  activate_as<act, T>(a.activation, v, static_cast<A>(a.slope));
  store<N>(static_cast<T*>(a.y) + row * a.cols + col, v);
}

template <class A>
__device__ __forceinline__ void write_statistics(const LayerNorm& a, int64_t row, A mean, A rstd) {
  if (a.mean != nullptr) static_cast<A*>(a.mean)[row] = mean;
  if (a.rstd != nullptr) static_cast<A*>(a.rstd)[row] = rstd;
}

// What the first pass adds up: for the mean, or the squares right away.
template <bool CENTRED, class A>
__device__ __forceinline__ A first_term(A s) {
  return CENTRED ? s : s * s;
}

// THREADS threads hold a row of at most THREADS * ITEMS packs of N elements.
template <bool CENTRED, int act, class T, int N, int THREADS, int ITEMS>
__global__ void __launch_bounds__(row_block(THREADS)) layer_norm_kernel(LayerNorm a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  constexpr int kBlock = row_block(THREADS);
  constexpr int kRows = kBlock / THREADS;
  __shared__ A shared[32];
  const int lane = threadIdx.x % THREADS;
  const A inverse = A(1) / static_cast<A>(a.cols);
  // All threads of a block make the same number of turns: the sums need every one of them.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < a.rows;
       first += static_cast<int64_t>(gridDim.x) * kRows) {
    const int64_t row = first + threadIdx.x / THREADS;
    const int64_t residual_row = residual_row_of(a, row);
    const bool active = row < a.rows;
    A s[ITEMS][N];
    load_row<THREADS>(static_cast<const T*>(a.x) + row * a.cols, a.cols, active, s);
    if (a.residual != nullptr) {
      A other[ITEMS][N];
      load_row<THREADS>(static_cast<const T*>(a.residual) + residual_row * a.cols, a.cols, active, other);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) s[i][j] += other[i][j];
      }
    }
    A total = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) total += first_term<CENTRED>(s[i][j]);
    }
    if (a.sum != nullptr) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int col = (i * THREADS + lane) * N;
        if (active && col < a.cols) store<N>(static_cast<T*>(a.sum) + row * a.cols + col, s[i]);
      }
    }
    A mean = 0;
    A variance = row_sum<THREADS>(total, shared) * inverse;
    if constexpr (CENTRED) {
      mean = variance;
      A squares = 0;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (active && (i * THREADS + lane) * N < a.cols) {
#pragma unroll
          for (int j = 0; j < N; ++j) squares += (s[i][j] - mean) * (s[i][j] - mean);
        }
      }
      variance = row_sum<THREADS>(squares, shared) * inverse;
      correct_moments<THREADS>(mean, variance, inverse, shared, [&] {
        A sum = 0;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
          if (active && (i * THREADS + lane) * N < a.cols) {
#pragma unroll
            for (int j = 0; j < N; ++j) sum += s[i][j] - mean;
          }
        }
        return sum;
      });
    }
    const A rstd = rsqrt(variance + static_cast<A>(a.eps));
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = (i * THREADS + lane) * N;
      if (active && col < a.cols) write_pack<act, T>(a, row, col, mean, rstd, s[i]);
    }
    if (active && lane == 0) write_statistics(a, row, mean, rstd);
  }
}

// Kahan's compensated sum ("Further remarks on reducing truncation errors", 1965): a thread adds up thousands of terms of a
// long row, and roundings that are all alike, as those of squares of one magnitude, would add up as well.
template <class A>
struct CompensatedSum {
  A sum = 0;
  A excess = 0;
  __device__ __forceinline__ void add(A term) {
    const A wanted = term - excess;
    const A next = sum + wanted;
    excess = (next - sum) - wanted;
    sum = next;
  }
};

// A block a row, of any length.
template <bool CENTRED, int act, class T, int N, int THREADS>
__global__ void __launch_bounds__(THREADS) layer_norm_long_kernel(LayerNorm a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[32];
  const A inverse = A(1) / static_cast<A>(a.cols);
  const int64_t start = static_cast<int64_t>(threadIdx.x) * N;
  constexpr int64_t kStep = static_cast<int64_t>(THREADS) * N;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const int64_t residual_row = residual_row_of(a, row);
    A s[N];
    // The sum of term(s) over this thread's part of the row
    const auto add_up = [&](auto term) {
      CompensatedSum<A> total;
      for (int64_t col = start; col < a.cols; col += kStep) {
        load_sum<T>(a, row, residual_row, col, s);
        A part = 0;
#pragma unroll
        for (int j = 0; j < N; ++j) part += term(s[j]);
        total.add(part);
      }
      return total.sum;
    };
    if (a.sum != nullptr) {
      for (int64_t col = start; col < a.cols; col += kStep) {
        load_sum<T>(a, row, residual_row, col, s);
        store<N>(static_cast<T*>(a.sum) + row * a.cols + col, s);
      }
    }
    A mean = 0;
    A variance = row_sum<THREADS>(add_up([](A v) { return first_term<CENTRED>(v); }), shared) * inverse;
    if constexpr (CENTRED) {
      mean = variance;
      variance = row_sum<THREADS>(add_up([mean](A v) { return (v - mean) * (v - mean); }), shared) * inverse;
      correct_moments<THREADS>(mean, variance, inverse, shared,
                               [&] { return add_up([mean](A v) { return v - mean; }); });
    }
    const A rstd = rsqrt(variance + static_cast<A>(a.eps));
    for (int64_t col = start; col < a.cols; col += kStep) {
      load_sum<T>(a, row, residual_row, col, s);
      write_pack<act, T>(a, row, col, mean, rstd, s);
    }
    if (threadIdx.x == 0) write_statistics(a, row, mean, rstd);
  }
}

template <class T, int N, int THREADS, int ITEMS>
void launch_rows(const LayerNorm& a, cudaStream_t stream) {
  constexpr int kBlock = row_block(THREADS);
  const unsigned grid = row_grid(a.rows, kBlock / THREADS, kBlock);
  dispatch_row_activation(a.activation, [&](auto act) {
    constexpr int kAct = decltype(act)::value;
    const auto kernel = a.centred ? layer_norm_kernel<true, kAct, T, N, THREADS, ITEMS>
                                  : layer_norm_kernel<false, kAct, T, N, THREADS, ITEMS>;
    launch_overlapped(kernel, grid, kBlock, stream, a);
  });
}

template <class T, int N, int THREADS>
void launch_long(const LayerNorm& a, cudaStream_t stream) {
  const unsigned grid = row_grid(a.rows, 1, THREADS);
  const auto kernel = a.centred ? layer_norm_long_kernel<true, kAny, T, N, THREADS>
                                : layer_norm_long_kernel<false, kAny, T, N, THREADS>;
  launch_overlapped(kernel, grid, THREADS, stream, a);
}

template <class T>
void launch(const LayerNorm& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const bool packed = a.cols % N == 0 && aligned(a.x) && aligned(a.y) && aligned(a.residual) &&
                      aligned(a.sum) && aligned(a.weight) && aligned(a.bias);
  if (!packed) {
    if (a.cols <= 128) return launch_rows<T, 1, 32, 4>(a, stream);
    return launch_long<T, 1, 256>(a, stream);
  }
  if constexpr (sizeof(T) == 8) {
    launch_long<T, N, 256>(a, stream);  // a reference type: one kernel is enough
  } else {
    dispatch_rows<N>(
        a.cols / N, a.rows, [&](auto shape) { launch_rows<T, N, shape.threads, shape.items>(a, stream); },
        [&] { launch_long<T, N, 1024>(a, stream); });
  }
}

}  // namespace

int launch_layer_norm(const LayerNorm& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
