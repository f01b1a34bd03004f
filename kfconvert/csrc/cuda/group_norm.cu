// y = act((x - mean(x)) / sqrt(var(x) + eps) * weight + bias), statistics over a row
//   x, y: (rows, channels, inner), a row the channels of one group of one image;  weight, bias: (groups, channels);
//   mean, rstd: (rows), where a gradient follows
//
// Limited by memory bandwidth: a block a row, which it reads three times, after the first mostly from L2, and
// writes once. Few images of few groups leave multiprocessors idle.
#include "kernels.h"
#include "vector.cuh"

namespace kfc {
namespace {

// N elements a thread and access; they are of one channel, as N divides inner.
template <class T, int N, int THREADS>
__global__ void __launch_bounds__(THREADS) group_norm_kernel(GroupNorm a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[32];
  const int64_t cols = a.channels * a.inner;
  const A inverse = A(1) / static_cast<A>(cols);
  const int64_t start = static_cast<int64_t>(threadIdx.x) * N;
  constexpr int64_t kStep = static_cast<int64_t>(THREADS) * N;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + row * cols;
    T* y = static_cast<T*>(a.y) + row * cols;
    A total = 0;
    for (int64_t col = start; col < cols; col += kStep) {
      A s[N];
      load<N>(x + col, s);
#pragma unroll
      for (int j = 0; j < N; ++j) total += s[j];
    }
    A mean = row_sum<THREADS>(total, shared) * inverse;
    A squares = 0;
    for (int64_t col = start; col < cols; col += kStep) {
      A s[N];
      load<N>(x + col, s);
#pragma unroll
      for (int j = 0; j < N; ++j) squares += (s[j] - mean) * (s[j] - mean);
    }
    A variance = row_sum<THREADS>(squares, shared) * inverse;
    correct_moments<THREADS>(mean, variance, inverse, shared, [&] {
      A sum = 0;
      for (int64_t col = start; col < cols; col += kStep) {
        A s[N];
        load<N>(x + col, s);
#pragma unroll
        for (int j = 0; j < N; ++j) sum += s[j] - mean;
      }
      return sum;
    });
    const A rstd = rsqrt(variance + static_cast<A>(a.eps));
    if (threadIdx.x == 0) {
      if (a.mean != nullptr) static_cast<A*>(a.mean)[row] = mean;
      if (a.rstd != nullptr) static_cast<A*>(a.rstd)[row] = rstd;
    }
    const int64_t first = row % a.groups * a.channels;
    for (int64_t col = start; col < cols; col += kStep) {
      // A division of 64-bit integers for each access would cost more than the access.
      const int64_t channel = first + static_cast<uint32_t>(col) / static_cast<uint32_t>(a.inner);
      const A scale = a.weight == nullptr ? rstd : rstd * widen(static_cast<const T*>(a.weight)[channel]);
      const A shift = a.bias == nullptr ? A(0) : widen(static_cast<const T*>(a.bias)[channel]);
      A s[N];
      load<N>(x + col, s);
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] = (s[j] - mean) * scale + shift;
      activate_pack<T>(a.activation, s, static_cast<A>(a.slope));
      store<N>(y + col, s);
    }
  }
}

template <class T, int N, int THREADS>
void launch_rows(const GroupNorm& a, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = int64_t{1} << 30;
  const unsigned grid = static_cast<unsigned>(a.rows < kMostBlocks ? a.rows : kMostBlocks);
  launch_overlapped(group_norm_kernel<T, N, THREADS>, grid, THREADS, stream, a);
}

template <class T>
void launch(const GroupNorm& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  if (sizeof(T) == 8 || a.inner % N != 0 || !aligned(a.x) || !aligned(a.y)) {
    return launch_rows<T, 1, 512>(a, stream);  // float64 is a reference type: one kernel is enough
  }
  if (a.channels * a.inner <= 512 * N) return launch_rows<T, N, 128>(a, stream);
  return launch_rows<T, N, 512>(a, stream);
}

}  // namespace

int launch_group_norm(const GroupNorm& a, void* stream) {
  // The channel of an element is found with 32 bits.
  if (a.channels * a.inner >= int64_t{1} << 32) return cudaErrorInvalidValue;
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
