// What kernels that take rows share: how rows are dealt to threads, the largest value of a row, and sums of
// exponentials in one pass.
#pragma once

#ifdef KFC_TUNE
#include <cstdlib>
#include <string>
#endif

#include "row_shapes.h"
#include "vector.cuh"

namespace kfc {
namespace {

constexpr int64_t kThreadsPerMultiprocessor = 2048;

// So many rows a multiprocessor are few.
constexpr int64_t kFewRows = 16;

// Threads of a block: rows that a warp or less takes share one.
__host__ __device__ constexpr int row_block(int threads) { return threads <= 32 ? 128 : threads; }

inline unsigned row_grid(int64_t rows, int rows_per_block, int threads) {
  const int64_t wanted = (rows + rows_per_block - 1) / rows_per_block;
  const int64_t most = multiprocessors() * (kThreadsPerMultiprocessor / threads) * 4;
  return static_cast<unsigned>(wanted < most ? wanted : most);
}

// How many threads share a row, how many packs each of them holds, and whether a norm loads its weight and bias early:
// before the first row they take registers, after its sums they would have to be waited for.
template <int THREADS, int ITEMS, bool EARLY>
struct RowShape {
  static constexpr int threads = THREADS;
  static constexpr int items = ITEMS;
  static constexpr bool early = EARLY;
};

// Calls launch with the shape of row_shapes.h for rows of so many packs of N elements, or launch_long where none is
// wide enough. Where KFC_TUNE is defined, with the shape that the environment names, as scripts/tune_kernels.py does.
template <int N, class Launch, class LaunchLong>
void dispatch_rows(int64_t packs, int64_t rows, Launch launch, LaunchLong launch_long) {
#ifdef KFC_TUNE
  const char* asked = std::getenv("KFCONVERT_ROW_SHAPE");
  const std::string shape = asked == nullptr ? "" : asked;
#define KFC_CANDIDATE(THREADS, ITEMS, EARLY)                               \
  if (shape == #THREADS "x" #ITEMS " " #EARLY && packs <= THREADS * ITEMS) \
    return launch(RowShape<THREADS, ITEMS, EARLY>());
  KFC_ROW_CANDIDATES(KFC_CANDIDATE)
#undef KFC_CANDIDATE
#endif
  const bool few = rows <= kFewRows * multiprocessors();
#define KFC_ROW_SHAPE(PACKS, ONLY_FEW, THREADS, ITEMS, EARLY) \
  if (packs <= PACKS && (few || !ONLY_FEW)) return launch(RowShape<THREADS, ITEMS, EARLY>());
  if constexpr (N == 4) {
    KFC_ROW_SHAPES_4(KFC_ROW_SHAPE)
  } else {
    KFC_ROW_SHAPES_8(KFC_ROW_SHAPE)
  }
#undef KFC_ROW_SHAPE
  launch_long();
}

// Calls body(row, active) for the rows of this thread's group of THREADS. All threads of a block make the same number
// of turns, since the sums need every one of them: beyond the last row `active` is false.
template <int THREADS, class Body>
__device__ __forceinline__ void for_rows(int64_t rows, Body body) {
  constexpr int kRows = row_block(THREADS) / THREADS;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < rows;
       first += static_cast<int64_t>(gridDim.x) * kRows) {
    const int64_t row = first + threadIdx.x / THREADS;
    body(row, row < rows);
  }
}

// A thread's packs of a row as they are in memory. Load all rows that belong together before the first is converted, as
// a conversion waits for its load.
template <class T, int N, int ITEMS>
struct RowWords {
  using P = Pack<T, N>;
  Word<P> words[ITEMS];

  __device__ __forceinline__ explicit RowWords(float absent = 0) {
    P pack;
#pragma unroll
    for (int j = 0; j < N; ++j) pack.v[j] = static_cast<T>(absent);
    const auto word = word_of(pack);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) words[i] = word;
  }

  // Elements beyond the end of the row keep the value `absent`; a row that is not active is not read.
  template <int THREADS>
  __device__ __forceinline__ void load(const T* row, int64_t cols, bool active) {
    const int lane = threadIdx.x % THREADS;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = (i * THREADS + lane) * N;
      if (active && col < cols) words[i] = load_word<P>(row + col);
    }
  }

  template <class A>
  __device__ __forceinline__ void get(int item, A (&to)[N]) const {
    widen_word<T>(words[item], to);
  }

  template <class A>
  __device__ __forceinline__ void add_to(int item, A (&to)[N]) const {
    A other[N];
    get(item, other);
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] += other[j];
  }
};

// A thread's packs of a row of so many columns.
template <int THREADS, class T, int N, int ITEMS, class A>
__device__ __forceinline__ void load_row(const T* row, int64_t cols, bool active, A (&to)[ITEMS][N]) {
  RowWords<T, N, ITEMS> words;
  words.template load<THREADS>(row, cols, active);
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) words.get(i, to[i]);
}

__device__ __forceinline__ float max_of(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ double max_of(double a, double b) { return fmax(a, b); }

// The largest value over the threads of a row, as row_sums adds them; a NaN does not count.
template <int THREADS, class A>
__device__ __forceinline__ A row_max(A value, A* shared) {
  constexpr int kWidth = THREADS < 32 ? THREADS : 32;
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    value = max_of(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  if constexpr (THREADS > 32) {
    const int lane = threadIdx.x % 32;
    __syncthreads();  // the last sums have been read by all
    if (lane == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    if constexpr (THREADS / 32 <= 8) {
      value = shared[0];
#pragma unroll
      for (int w = 1; w < THREADS / 32; ++w) value = max_of(value, shared[w]);
    } else {
      value = lane < THREADS / 32 ? shared[lane] : A(-INFINITY);
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) value = max_of(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
  }
  return value;
}

// A thread's part of sum(exp(v - largest)), of values that come some packs after the others (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", 2018).
template <class A, class M>
struct OnlineSum {
  A largest = A(-INFINITY);
  A total = 0;

  template <int ITEMS, int N>
  __device__ __forceinline__ void add(const A (&v)[ITEMS][N]) {
    A next = largest;
    for_each(v, [&](A value) { next = max_of(next, value); });
    if (next == A(-INFINITY)) {
      for_each(v, [&](A value) { total = value != value ? value : total; });  // max_of skips a NaN; the sum must not
      return;
    }
    if (next > largest) total *= M::exp(largest - next);
    largest = next;
    for_each(v, [&](A value) { total += M::exp(value - next); });
  }

  // The sum over the row's threads; `row_largest` becomes the largest value of the row.
  template <int THREADS>
  __device__ __forceinline__ A row_total(A& row_largest, A* shared) {
    row_largest = row_max<THREADS>(largest, shared);
    // A thread that has seen nothing but -inf and NaN adds its total, 0 or NaN, as it is: -inf - -inf would be NaN.
    return row_sum<THREADS>(largest == A(-INFINITY) ? total : total * M::exp(largest - row_largest), shared);
  }

 private:
  template <int ITEMS, int N, class F>
  static __device__ __forceinline__ void for_each(const A (&v)[ITEMS][N], F f) {
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) f(v[i][j]);
    }
  }
};

}  // namespace
}  // namespace kfc
