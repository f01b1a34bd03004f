// w = weight + offset; v = xhat w + bias; g = grad act'(v); xhat = (s - mean) rstd
// grad_x = rstd (g w - mean(g w) - xhat mean(g w xhat)) + grad_sum; grad_weight = sum g xhat; grad_bias = sum
// g. Without `mean` it is an RMS norm: mean and mean(g w) are 0.
//   s, grad, grad_sum, grad_x: (rows, cols);  mean, rstd: (rows);  weight, bias: (cols);  partials:
//   (partials, cols)
//
// Limited by memory bandwidth. A fixed grid walks over the rows; each thread keeps the sums of its own
// columns in registers, and the block writes one row of partial sums at its end. A second kernel adds the
// partials in a fixed order, so that the result is the same at every call. Rows too long for registers, and those of
// half types with weights of float, take two kernels that read the data again.
#include "add_partials.cuh"
#include "kernels.h"
#include "rows.cuh"

namespace kfc {
namespace {

constexpr int kLeastBlock = 256;
constexpr int kColumnThreads = 128;
constexpr int64_t kMaxColumnPartials = 64;

// Threads of a block: rows that fewer take share one, so that they share a row of partial sums.
__host__ __device__ constexpr int backward_block(int threads) { return threads < kLeastBlock ? kLeastBlock : threads; }

// So many blocks a multiprocessor have enough in flight, and every further one would write partial sums.
constexpr int kBlocksPerMultiprocessor = 2;

template <class A>
__device__ __forceinline__ A mean_of_row(const LayerNormBackward& a, int64_t row) {
  return a.mean == nullptr ? A(0) : static_cast<const A*>(a.mean)[row];
}

// g and xhat of one pack, in place of grad and s
template <int act, class T, int N, class A>
__device__ __forceinline__ void gradient_of_norm(const LayerNormBackward& a, int64_t col, A mean, A rstd, A (&s)[N],
                                                 A (&g)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) s[j] = (s[j] - mean) * rstd;
  if constexpr (act != kNone) {
    A v[N];
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = s[j];
    apply_affine<T>(a, col, v);
    activate_backward_as<act, T>(a.activation, g, v, static_cast<A>(a.slope));
  }
}

template <class T, int N, class A>
__device__ __forceinline__ void multiply_by_weight(const LayerNormBackward& a, int64_t col, A (&g)[N]) {
  if (a.weight == nullptr) return;
  A weight[N];
  load_weight<N, T>(a, col, weight);
#pragma unroll
  for (int j = 0; j < N; ++j) g[j] *= weight[j];
}

// g w (in g) and xhat become grad_x
template <class T, int N, class A>
__device__ __forceinline__ void write_grad_x(const LayerNormBackward& a, int64_t at, A rstd, A mean_g, A mean_gx,
                                             const A (&xhat)[N], A (&g)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) g[j] = rstd * (g[j] - mean_g - xhat[j] * mean_gx);
  if (a.grad_sum != nullptr) {
    A other[N];
    load<N>(static_cast<const T*>(a.grad_sum) + at, other);
#pragma unroll
    for (int j = 0; j < N; ++j) g[j] += other[j];
  }
  store<N>(static_cast<T*>(a.grad_x) + at, g);
}

// Whether a row is loaded while the row before it is worked on. Not for the half types, whose rows take twice the
// registers: only one block would fit a multiprocessor (16384 x 4096 on an H100: 224 us, 168 without; float32: 290 and
// 296).
template <class T>
constexpr bool kReadsAhead = sizeof(T) == 4;

// A thread's part of the row that comes next.
template <class T, int N, int ITEMS, class A>
struct RowAhead {
  Pack<T, N> s[ITEMS];
  Pack<T, N> grad[ITEMS];
  A mean_ahead;
  A rstd_ahead;

  // Of a row past the last one nothing.
  template <int THREADS>
  __device__ __forceinline__ void load(const LayerNormBackward& a, int64_t row, int lane) {
    if (row >= a.rows) return;
    mean_ahead = mean_of_row<A>(a, row);
    rstd_ahead = static_cast<const A*>(a.rstd)[row];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = (i * THREADS + lane) * N;
      if (col >= a.cols) continue;
      s[i] = load_pack<Pack<T, N>>(static_cast<const T*>(a.s) + row * a.cols + col);
      grad[i] = load_pack<Pack<T, N>>(static_cast<const T*>(a.grad) + row * a.cols + col);
    }
  }

  __device__ __forceinline__ void get(A& mean, A& rstd, A (&xhat)[ITEMS][N], A (&g)[ITEMS][N]) const {
    mean = mean_ahead;
    rstd = rstd_ahead;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        xhat[i][j] = widen(s[i].v[j]);
        g[i][j] = widen(grad[i].v[j]);
      }
    }
  }
};

template <int act, class T, int N, int THREADS, int ITEMS>
__global__ void __launch_bounds__(backward_block(THREADS), THREADS* ITEMS <= 512 ? kBlocksPerMultiprocessor : 1)
    layer_norm_backward_kernel(LayerNormBackward a) {
  wait_for_previous_kernel();
  if constexpr (sizeof(T) == 2) __builtin_assume(a.affine_dtype != DType::f32);  // choose() takes no other
  using A = typename Accumulate<T>::type;
  constexpr int kThreads = backward_block(THREADS);
  constexpr int kRows = kThreads / THREADS;
  __shared__ A shared[64];
  __shared__ A columns[kRows > 1 ? THREADS * ITEMS * N : 1];
  const int lane = threadIdx.x % THREADS;
  const int group = threadIdx.x / THREADS;
  const A inverse = A(1) / static_cast<A>(a.cols);
  A sum_weight[ITEMS][N] = {};
  A sum_bias[ITEMS][N] = {};
  const int64_t step = static_cast<int64_t>(gridDim.x) * kRows;
  int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + group;
  RowAhead<T, N, ITEMS, A> ahead;
  if constexpr (kReadsAhead<T>) ahead.template load<THREADS>(a, row, lane);
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < a.rows; first += step, row += step) {
    const bool active = row < a.rows;
    A mean;
    A rstd;
    A xhat[ITEMS][N];
    A g[ITEMS][N];
    if constexpr (kReadsAhead<T>) {
      ahead.get(mean, rstd, xhat, g);
      ahead.template load<THREADS>(a, row + step, lane);
    } else {
      mean = active ? mean_of_row<A>(a, row) : A(0);
      rstd = active ? static_cast<const A*>(a.rstd)[row] : A(0);
      load_row<THREADS>(static_cast<const T*>(a.s) + row * a.cols, a.cols, active, xhat);
      load_row<THREADS>(static_cast<const T*>(a.grad) + row * a.cols, a.cols, active, g);
    }
    A sums[2] = {A(0), A(0)};  // of g and of g * xhat
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = (i * THREADS + lane) * N;
      if (active && col < a.cols) {
        gradient_of_norm<act, T>(a, col, mean, rstd, xhat[i], g[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          sum_weight[i][j] += g[i][j] * xhat[i][j];
          sum_bias[i][j] += g[i][j];
        }
        multiply_by_weight<T>(a, col, g[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          sums[0] += g[i][j];
          sums[1] += g[i][j] * xhat[i][j];
        }
      }
    }
    row_sums<THREADS>(sums, shared);
    const A mean_g = a.mean == nullptr ? A(0) : sums[0] * inverse;
    const A mean_gx = sums[1] * inverse;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = (i * THREADS + lane) * N;
      if (active && col < a.cols) write_grad_x<T>(a, row * a.cols + col, rstd, mean_g, mean_gx, xhat[i], g[i]);
    }
  }
  // The block's row groups add their sums one after another, in the same order at every call.
  const auto write_partials = [&](void* partials, A(&sums)[ITEMS][N]) {
    if (partials == nullptr) return;
    if constexpr (kRows > 1) {
      for (int turn = 0; turn < kRows; ++turn) {
        __syncthreads();
        if (group != turn) continue;
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
          for (int j = 0; j < N; ++j) {
            A& column = columns[(i * THREADS + lane) * N + j];
            column = turn == 0 ? sums[i][j] : column + sums[i][j];
          }
        }
      }
      __syncthreads();
      for (int col = threadIdx.x; col < a.cols; col += kThreads) {
        static_cast<A*>(partials)[blockIdx.x * a.cols + col] = columns[col];
      }
    } else {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int col = (i * THREADS + lane) * N;
        if (col < a.cols) store_wide<N>(static_cast<A*>(partials) + blockIdx.x * a.cols + col, sums[i]);
      }
    }
  };
  write_partials(a.partial_weight, sum_weight);
  write_partials(a.partial_bias, sum_bias);
}

// grad_x of a row of any length, a block a row
template <int act, class T, int N, int THREADS>
__global__ void __launch_bounds__(THREADS) layer_norm_backward_long_kernel(LayerNormBackward a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[64];
  const A inverse = A(1) / static_cast<A>(a.cols);
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const A mean = mean_of_row<A>(a, row);
    const A rstd = static_cast<const A*>(a.rstd)[row];
    const auto load_pack = [&](int64_t col, A(&xhat)[N], A(&g)[N]) {
      load<N>(static_cast<const T*>(a.s) + row * a.cols + col, xhat);
      load<N>(static_cast<const T*>(a.grad) + row * a.cols + col, g);
      gradient_of_norm<act, T>(a, col, mean, rstd, xhat, g);
      multiply_by_weight<T>(a, col, g);
    };
    A xhat[N];
    A g[N];
    A sums[2] = {A(0), A(0)};  // of g and of g * xhat
    for (int64_t col = static_cast<int64_t>(threadIdx.x) * N; col < a.cols; col += THREADS * N) {
      load_pack(col, xhat, g);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sums[0] += g[j];
        sums[1] += g[j] * xhat[j];
      }
    }
    row_sums<THREADS>(sums, shared);
    const A mean_g = a.mean == nullptr ? A(0) : sums[0] * inverse;
    const A mean_gx = sums[1] * inverse;
    for (int64_t col = static_cast<int64_t>(threadIdx.x) * N; col < a.cols; col += THREADS * N) {
      load_pack(col, xhat, g);
      write_grad_x<T>(a, row * a.cols + col, rstd, mean_g, mean_gx, xhat, g);
    }
  }
}

// Partial sums of the columns: thread = column, blockIdx.y = the share of the rows
template <int act, class T>
__global__ void __launch_bounds__(kColumnThreads) column_sums_kernel(LayerNormBackward a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kColumnThreads + threadIdx.x;
  if (col >= a.cols) return;
  A sum_weight = 0;
  A sum_bias = 0;
  for (int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    A xhat[1];
    A g[1];
    load<1>(static_cast<const T*>(a.s) + row * a.cols + col, xhat);
    load<1>(static_cast<const T*>(a.grad) + row * a.cols + col, g);
    gradient_of_norm<act, T>(a, col, mean_of_row<A>(a, row), static_cast<const A*>(a.rstd)[row], xhat, g);
    sum_weight += g[0] * xhat[0];
    sum_bias += g[0];
  }
  const int64_t at = blockIdx.y * a.cols + col;
  if (a.partial_weight != nullptr) static_cast<A*>(a.partial_weight)[at] = sum_weight;
  if (a.partial_bias != nullptr) static_cast<A*>(a.partial_bias)[at] = sum_bias;
}

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// One choice for the launch and for the number of partials. Threads and packs a thread by packs a row: at
// most three packs a thread, since each of its columns takes four registers (s, g and the two sums).
template <class T, class Rows, class Long>
auto choose(const LayerNormBackward& a, Rows rows, Long long_rows) {
  constexpr int N = kPackBytes / sizeof(T);
  const int64_t packs = a.cols / N;
  if constexpr (sizeof(T) < 8) {
    const bool packed = has_own_affine<T>(a) && a.cols % N == 0 && aligned(a.s) && aligned(a.grad) &&
                        aligned(a.grad_sum) && aligned(a.grad_x) && aligned(a.weight) && aligned(a.bias);
    const bool few = a.rows <= kFewRows * multiprocessors();
    if (packed && packs <= 32) return rows.template operator()<T, N, 32, 1>();
    if (packed && packs <= 64 && few) return rows.template operator()<T, N, 64, 1>();
    if (packed && packs <= 64) return rows.template operator()<T, N, 32, 2>();
    if (packed && packs <= 128 && few) return rows.template operator()<T, N, 128, 1>();
    if (packed && packs <= 96) return rows.template operator()<T, N, 32, 3>();
    if (packed && packs <= 128) return rows.template operator()<T, N, 64, 2>();
    if (packed && packs <= 256) return rows.template operator()<T, N, 128, 2>();
    if (packed && packs <= 512) return rows.template operator()<T, N, 512, 1>();
    if (packed && packs <= 1024) return rows.template operator()<T, N, 512, 2>();
  }
  return long_rows.template operator()<T>();
}

struct Partials {
  const LayerNormBackward& a;
  template <class T, int N, int THREADS, int ITEMS>
  int64_t operator()() const {
    constexpr int kRows = backward_block(THREADS) / THREADS;
    return smaller((a.rows + kRows - 1) / kRows, multiprocessors() * int64_t{kBlocksPerMultiprocessor});
  }
  template <class T>
  int64_t operator()() const {
    return smaller(a.rows, kMaxColumnPartials);
  }
};

struct Launch {
  const LayerNormBackward& a;
  cudaStream_t stream;
  template <class T, int N, int THREADS, int ITEMS>
  void operator()() const {
    dispatch_row_activation(a.activation, [&](auto act) {
      launch_overlapped(layer_norm_backward_kernel<decltype(act)::value, T, N, THREADS, ITEMS>,
                        static_cast<unsigned>(a.partials), backward_block(THREADS), stream, a);
    });
  }
  template <class T>
  void operator()() const {
    const unsigned rows = static_cast<unsigned>(smaller(a.rows, multiprocessors() * int64_t{32}));
    const dim3 grid(static_cast<unsigned>((a.cols + kColumnThreads - 1) / kColumnThreads),
                    static_cast<unsigned>(a.partials));
    dispatch_row_activation(a.activation, [&](auto act) {
      launch_overlapped(layer_norm_backward_long_kernel<decltype(act)::value, T, 1, 256>, rows, 256, stream, a);
      if (a.partial_weight == nullptr && a.partial_bias == nullptr) return;
      launch_overlapped(column_sums_kernel<decltype(act)::value, T>, grid, kColumnThreads, stream, a);
    });
  }
};

}  // namespace

int64_t layer_norm_backward_partials(const LayerNormBackward& a) {
  if (a.rows == 0 || a.cols == 0) return 0;
  const Partials partials{a};
  int64_t count = 0;
  KFC_DISPATCH_DTYPE(a.dtype, count = choose<T>(a, partials, partials));
  return count;
}

int launch_layer_norm_backward(const LayerNormBackward& a, void* grad_weight, void* grad_bias, void* raw_stream) {
  const cudaStream_t stream = static_cast<cudaStream_t>(raw_stream);
  if (a.cols == 0) return cudaSuccess;
  if (a.rows > 0) {
    const Launch launch{a, stream};
    KFC_DISPATCH_DTYPE(a.dtype, choose<T>(a, launch, launch));
  }
  const ColumnSums sums{{a.partial_weight, a.partial_bias}, {grad_weight, grad_bias}, a.partials, a.cols};
  add_partials(sums, a.affine_dtype, stream);
  return cudaGetLastError();
}

}  // namespace kfc
