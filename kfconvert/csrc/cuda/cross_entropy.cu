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

// Label smoothing in the accumulation type, from the host: conversions of doubles and a division in every thread would
// keep a short row waiting.
template <class A>
struct Smoothing {
  A amount;
  A kept;      // 1 - amount
  A of_class;  // what is expected of each class but the target, amount / cols
  A of_target;

  explicit Smoothing(const CrossEntropy& a)
      : amount(static_cast<A>(a.smoothing)),
        kept(A(1) - amount),
        of_class(amount / static_cast<A>(a.cols)),
        of_target(kept + of_class) {}
};

// THREADS threads take THREADS * ITEMS packs of N elements of a row at a time.
template <class T, int N, int THREADS, int ITEMS>
__global__ void __launch_bounds__(row_block(THREADS))
    cross_entropy_kernel(CrossEntropy a, Smoothing<typename Accumulate<T>::type> smoothing) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  constexpr int kStep = THREADS * ITEMS * N;
  __shared__ A shared[32];
  const int lane = threadIdx.x % THREADS;
  for_rows<THREADS>(a.rows, [&](int64_t row, bool active) {
    const T* from = static_cast<const T*>(a.x) + row * a.cols;
    const int64_t target = active ? a.target[row] : -1;
    const bool valid = target >= 0 && target < a.cols;
    A of_target = A(NAN);
    OnlineSum<A, Math<A>> online;
    A sum = 0;
    for (int64_t first = 0; first < a.cols; first += kStep) {
      // Beyond the end of the row, elements are -inf: they do not change the largest value, and add nothing to the sum.
      RowWords<T, N, ITEMS> words(-INFINITY);
      words.template load<THREADS>(from + first, a.cols - first, active);
      if (first == 0 && valid) of_target = widen(from[target]);
      A v[ITEMS][N];
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) words.get(i, v[i]);
      online.add(v);
      if (smoothing.amount == A(0)) continue;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (!active || first + (i * THREADS + lane) * N >= a.cols) continue;
#pragma unroll
        for (int j = 0; j < N; ++j) sum += v[i][j];
      }
    }
    A largest;
    const A total = online.template row_total<THREADS>(largest, shared);
    if (smoothing.amount != A(0)) sum = row_sum<THREADS>(sum, shared);
    if (!active || lane != 0) return;
    const A rest = log_of(total);
    static_cast<A*>(a.lse)[2 * row] = largest;
    static_cast<A*>(a.lse)[2 * row + 1] = rest;
    A loss = 0;
    if (target != a.ignored) {
      loss = smoothing.kept * (rest + (largest - of_target));
      if (smoothing.amount != A(0)) {
        loss += smoothing.amount * (rest + (largest - sum / static_cast<A>(a.cols)));
      }
    }
    static_cast<A*>(a.loss)[row] = loss;
  });
}

constexpr int kTotalThreads = 1024;
constexpr int kTotalRows = 8;  // of a thread, at a time

// The result and the weight, by one block.
template <class T>
__global__ void __launch_bounds__(kTotalThreads) total_kernel(CrossEntropy a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[64];
  A sums[2] = {0, 0};  // of the losses, and of the rows that count
  for (int64_t first = threadIdx.x; first < a.rows; first += kTotalRows * kTotalThreads) {
    A loss[kTotalRows] = {};
    int64_t target[kTotalRows];
#pragma unroll
    for (int i = 0; i < kTotalRows; ++i) {
      const int64_t row = first + i * kTotalThreads;
      target[i] = row < a.rows ? a.target[row] : a.ignored;
      if (row < a.rows) loss[i] = static_cast<const A*>(a.loss)[row];
    }
#pragma unroll
    for (int i = 0; i < kTotalRows; ++i) {
      sums[0] += loss[i];
      sums[1] += target[i] == a.ignored ? A(0) : A(1);
    }
  }
  row_sums<kTotalThreads>(sums, shared);
  if (threadIdx.x != 0) return;
  // Where no row counts the mean is 0 / 0.
  *static_cast<T*>(a.result) = narrow<T>(a.mean ? sums[0] / sums[1] : sums[0]);
  *static_cast<A*>(a.weight) = a.mean ? A(1) / sums[1] : A(1);
}

// What the losses of a row are multiplied by.
template <class T, class A>
__device__ __forceinline__ A grad_of_row(const CrossEntropy& a, int64_t row) {
  if (a.grad_stride != 0) return static_cast<const A*>(a.grad)[row];
  return widen(*static_cast<const T*>(a.grad)) * *static_cast<const A*>(a.weight);
}

// THREADS threads take THREADS * ITEMS packs of N elements of a row at a time.
template <class T, int N, int THREADS, int ITEMS>
__global__ void __launch_bounds__(row_block(THREADS))
    cross_entropy_backward_kernel(CrossEntropy a, Smoothing<typename Accumulate<T>::type> smoothing) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  using M = typename MathFor<T>::type;
  constexpr int kStep = THREADS * ITEMS * N;
  const int lane = threadIdx.x % THREADS;
  for_rows<THREADS>(a.rows, [&](int64_t row, bool active) {
    for (int64_t first = 0; first < a.cols; first += kStep) {
      RowWords<T, N, ITEMS> words;
      words.template load<THREADS>(static_cast<const T*>(a.x) + row * a.cols + first, a.cols - first, active);
      if (!active) return;
      // All of these are asked for before x is waited for.
      const int64_t target = a.target[row];
      A lse[2] = {static_cast<const A*>(a.lse)[2 * row], static_cast<const A*>(a.lse)[2 * row + 1]};
      A grad = grad_of_row<T, A>(a, row);
      if (target < 0 || target >= a.cols) grad = A(NAN);
      if (target == a.ignored) {
        words = RowWords<T, N, ITEMS>();
        lse[0] = lse[1] = grad = A(0);
      }
      // The target counted from this thread's first element, where it is among those of all threads.
      const int64_t after = target - first - lane * N;
      const int hit = after >= 0 && after < kStep ? static_cast<int>(after) : -1;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int64_t col = first + (i * THREADS + lane) * N;
        if (col >= a.cols) break;
        A v[N];
        words.get(i, v);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const A expected = i * THREADS * N + j == hit ? smoothing.of_target : smoothing.of_class;
          v[j] = grad * (M::exp((v[j] - lse[0]) - lse[1]) - expected);
        }
        store<N>(static_cast<T*>(a.grad_x) + row * a.cols + col, v);
      }
    }
  });
}

template <class T, int N, int THREADS, int ITEMS>
void launch_rows(const CrossEntropy& a, cudaStream_t stream) {
  constexpr int kBlock = row_block(THREADS);
  const auto kernel = a.grad_x != nullptr ? cross_entropy_backward_kernel<T, N, THREADS, ITEMS>
                                          : cross_entropy_kernel<T, N, THREADS, ITEMS>;
  launch_overlapped(kernel, row_grid(a.rows, kBlock / THREADS, kBlock), kBlock, stream, a,
                    Smoothing<typename Accumulate<T>::type>(a));
}

template <class T>
void launch(const CrossEntropy& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const bool packed = a.cols % N == 0 && aligned(a.x) && aligned(a.grad_x);
  if (!packed && a.cols <= 1024) return launch_rows<T, 1, 32, 4>(a, stream);
  if (!packed) return launch_rows<T, 1, 512, 4>(a, stream);
  if constexpr (sizeof(T) == 8) {
    launch_rows<T, N, 128, 2>(a, stream);  // a reference type: one kernel is enough
  } else {
    dispatch_rows<N>(
        a.cols / N, a.rows, [&](auto shape) { launch_rows<T, N, shape.threads, shape.items>(a, stream); },
        [&] { launch_rows<T, N, 512, 4>(a, stream); });
  }
}

}  // namespace

int launch_cross_entropy(const CrossEntropy& a, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  KFC_DISPATCH_DTYPE(a.dtype, {
    if (a.rows > 0) launch<T>(a, cuda_stream);
    if (a.result != nullptr) launch_overlapped(total_kernel<T>, 1, kTotalThreads, cuda_stream, a);
  });
  return cudaGetLastError();
}

}  // namespace kfc
