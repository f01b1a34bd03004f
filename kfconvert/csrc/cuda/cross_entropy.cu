// loss = (1 - smoothing) * (lse - x[target]) + smoothing * (lse - mean(x)), lse = log(sum(exp(x))), for each row, or
// with grad_x its gradient: grad * (exp(x - lse) - (1 - smoothing) * (is target) - smoothing / cols)
//   x, grad_x: (rows, cols);  loss, target: (rows);  lse: (rows, 2);  grad: (rows) or one
// A target that is no class gives NaN.
//
// Limited by memory bandwidth: the logits are read once for the loss and once for the gradient, and no probabilities
// are written in between.
#include "kernels.h"
#include "rows.cuh"

namespace kfc {
namespace {

template <class A>
__device__ __forceinline__ A log_of(A v);
template <>
__device__ __forceinline__ float log_of(float v) {
  return logf(v);
}
template <>
__device__ __forceinline__ double log_of(double v) {
  return ::log(v);
}

template <class T, int N, int THREADS>
__global__ void __launch_bounds__(row_block(THREADS)) cross_entropy_kernel(CrossEntropy a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[32];
  const int lane = threadIdx.x % THREADS;
  const T* x = static_cast<const T*>(a.x);
  for_rows<THREADS>(a.rows, [&](int64_t row, bool active) {
    const T* from = x + row * a.cols;
    OnlineSum<A, Math<A>> online;
    A sum = 0;
    for (int64_t col = static_cast<int64_t>(lane) * N; active && col < a.cols; col += THREADS * N) {
      A v[N];
      load<N>(from + col, v);
      online.add(v);
#pragma unroll
      for (int j = 0; j < N; ++j) sum += v[j];
    }
    A largest;
    const A total = online.template row_total<THREADS>(largest, shared);
    if (a.smoothing != 0) sum = row_sum<THREADS>(sum, shared);
    if (!active || lane != 0) return;
    const A rest = log_of(total);
    static_cast<A*>(a.lse)[2 * row] = largest;
    static_cast<A*>(a.lse)[2 * row + 1] = rest;
    const int64_t target = a.target[row];
    A loss = 0;
    if (target != a.ignored && (target < 0 || target >= a.cols)) {
      loss = A(NAN);
    } else if (target != a.ignored) {
      const A smoothing = static_cast<A>(a.smoothing);
      loss = (A(1) - smoothing) * (rest + (largest - widen(from[target])));
      if (a.smoothing != 0) loss += smoothing * (rest + (largest - sum / static_cast<A>(a.cols)));
    }
    static_cast<A*>(a.loss)[row] = loss;
  });
}

constexpr int kTotalThreads = 1024;

// The result and the weight, by one block.
template <class T>
__global__ void __launch_bounds__(kTotalThreads) total_kernel(CrossEntropy a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[64];
  A sums[2] = {0, 0};  // of the losses, and of the rows that count
  for (int64_t row = threadIdx.x; row < a.rows; row += kTotalThreads) {
    sums[0] += static_cast<const A*>(a.loss)[row];
    sums[1] += a.target[row] == a.ignored ? A(0) : A(1);
  }
  row_sums<kTotalThreads>(sums, shared);
  if (threadIdx.x != 0) return;
  // Where no row counts the mean is 0 / 0.
  *static_cast<T*>(a.result) = narrow<T>(a.mean ? sums[0] / sums[1] : sums[0]);
  *static_cast<A*>(a.weight) = a.mean ? A(1) / sums[1] : A(1);
}

// THREADS threads take THREADS * ITEMS packs of N elements of a row at a time.
template <class T, int N, int THREADS, int ITEMS>
__global__ void __launch_bounds__(row_block(THREADS)) cross_entropy_backward_kernel(CrossEntropy a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  using M = typename MathFor<T>::type;
  constexpr int kStep = THREADS * ITEMS * N;
  const int lane = threadIdx.x % THREADS;
  const bool reduced = a.grad_stride == 0;
  const A weight = reduced ? widen(*static_cast<const T*>(a.grad)) * *static_cast<const A*>(a.weight) : A(0);
  for_rows<THREADS>(a.rows, [&](int64_t row, bool active) {
    for (int64_t first = 0; first < a.cols; first += kStep) {
      A v[ITEMS][N];
      load_row<THREADS>(static_cast<const T*>(a.x) + row * a.cols + first, a.cols - first, active, v);
      if (!active) return;
      const int64_t target = a.target[row];
      const bool valid = target >= 0 && target < a.cols;
      const A grad = !valid ? A(NAN) : reduced ? weight : static_cast<const A*>(a.grad)[row];
      const A largest = static_cast<const A*>(a.lse)[2 * row];
      const A rest = static_cast<const A*>(a.lse)[2 * row + 1];
      const A smoothing = static_cast<A>(a.smoothing);
      const A everywhere = smoothing / static_cast<A>(a.cols);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int64_t col = first + (i * THREADS + lane) * N;
        if (col >= a.cols) break;
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const A hit = col + j == target ? A(1) - smoothing : A(0);
          v[i][j] = target == a.ignored ? A(0) : grad * (M::exp((v[i][j] - largest) - rest) - hit - everywhere);
        }
        store<N>(static_cast<T*>(a.grad_x) + row * a.cols + col, v[i]);
      }
    }
  });
}

template <class T, int N, int THREADS, int ITEMS>
void launch_backward_rows(const CrossEntropy& a, cudaStream_t stream) {
  constexpr int kBlock = row_block(THREADS);
  launch_overlapped(cross_entropy_backward_kernel<T, N, THREADS, ITEMS>, row_grid(a.rows, kBlock / THREADS, kBlock),
                    kBlock, stream, a);
}

template <class T>
void launch_backward(const CrossEntropy& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const bool packed = a.cols % N == 0 && aligned(a.x) && aligned(a.grad_x);
  if (!packed && a.cols <= 1024) return launch_backward_rows<T, 1, 32, 4>(a, stream);
  if (!packed) return launch_backward_rows<T, 1, 512, 4>(a, stream);
  if constexpr (sizeof(T) == 8) {
    launch_backward_rows<T, N, 128, 2>(a, stream);  // a reference type: one kernel is enough
  } else {
    dispatch_rows<N>(
        a.cols / N, a.rows,
        [&](auto shape) { launch_backward_rows<T, N, shape.threads, shape.items>(a, stream); },
        [&] { launch_backward_rows<T, N, 512, 4>(a, stream); });
  }
}

template <class T, int N, int THREADS>
void launch_rows(const CrossEntropy& a, cudaStream_t stream) {
  constexpr int kBlock = row_block(THREADS);
  launch_overlapped(cross_entropy_kernel<T, N, THREADS>, row_grid(a.rows, kBlock / THREADS, kBlock), kBlock, stream, a);
}

template <class T>
void launch(const CrossEntropy& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const bool packed = a.cols % N == 0 && aligned(a.x);
  if (!packed) return a.cols <= 1024 ? launch_rows<T, 1, 32>(a, stream) : launch_rows<T, 1, 512>(a, stream);
  const int64_t packs = a.cols / N;
  if (packs <= 128) return launch_rows<T, N, 32>(a, stream);
  if (packs <= 1024) return launch_rows<T, N, 128>(a, stream);
  launch_rows<T, N, 512>(a, stream);
}

}  // namespace

int launch_cross_entropy(const CrossEntropy& a, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  KFC_DISPATCH_DTYPE(a.dtype, {
    if (a.grad_x != nullptr) {
      launch_backward<T>(a, cuda_stream);
    } else if (a.rows > 0) {
      launch<T>(a, cuda_stream);
    }
    if (a.result != nullptr) launch_overlapped(total_kernel<T>, 1, kTotalThreads, cuda_stream, a);
  });
  return cudaGetLastError();
}

}  // namespace kfc
