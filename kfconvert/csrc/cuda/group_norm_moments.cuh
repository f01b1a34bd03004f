// What the kernels of group norms share: limits, moments of values and how they are combined, and the result of a part
// of a contiguous row.
#pragma once

#include "kernels.h"
#include "vector.cuh"

namespace kfc {
namespace {

constexpr int kBatch = 4;  // packs that a thread loads before it uses the first of them
constexpr int kPartThreads = 256;
constexpr int kMostTileThreads = 512;
constexpr int kTileBytes = 128;                  // of a position that a block reads at least, where there are as many
constexpr int kMostGroups = 64;                  // of a tile: more than one channel each, or all in kTileBytes
constexpr int kThreadsPerMultiprocessor = 1024;  // have enough loads in flight
// A block reads a shorter row sooner than a second kernel starts.
constexpr int64_t kLeastBytes = 65536;
// Each block of the second kernel reads the moments of this many parts in little time.
constexpr int64_t kFewParts = 64;
// One block reads so many batches of packs a thread in less time than two kernels take.
constexpr int64_t kFewTurns = 2;
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
constexpr int kHeldBytes = 128;          // of a row that a thread holds at most, in registers of 4 bytes
constexpr int kHeldThreads = 512;        // of a block that holds a row or a part of it
constexpr int kShortThreads = 128;       // where there are many rows and each is short
constexpr int64_t kLeastHeld = 8192;     // elements that a block takes in less time than a cluster takes to combine
constexpr int kMostHeldChannels = 1024;  // whose weights and biases shared memory holds
// Memory is read by sectors, of which the groups of a channels-last position each take some in part. Tiles, which take
// groups together, are faster where this costs more than one and a half times the bytes of x, and more than so many.
constexpr int64_t kSectorBytes = 32;
constexpr int64_t kFewExtraBytes = int64_t{1} << 23;

// How many values, their mean, and the sum of the squares of their deviations from it.
template <class A>
struct Moments {
  A count;
  A mean;
  A squares;
};

// From sums over deviations from a pivot. It is one of the values: equal values leave nothing, and the squares lose no
// more digits than their number has, however far the mean is from 0.
template <class A>
__device__ __forceinline__ Moments<A> moments_of(A count, A pivot, A sum, A squares) {
  if (count == A(0)) return {A(0), A(0), A(0)};
  const A deviation = sum / count;
  const A rest = squares - sum * deviation;
  return {count, pivot + deviation, rest < A(0) ? A(0) : rest};
}

template <int N, class A>
__device__ __forceinline__ void add_deviations(const A (&values)[N], A pivot, A& sum, A& squares) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const A deviation = values[j] - pivot;
    sum += deviation;
    squares += deviation * deviation;
  }
}

// Of a thread's share of x[begin] to x[end - 1], which THREADS threads divide by packs.
template <int N, int THREADS, class T>
__device__ __forceinline__ auto moments_of_share(const T* x, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  using P = Pack<T, N>;
  constexpr int64_t kStep = static_cast<int64_t>(THREADS) * N;
  const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * N;
  const A pivot = first < end ? static_cast<A>(widen(x[first])) : A(0);
  A sum = 0;
  A squares = 0;
  int64_t packs = 0;
  for (int64_t at = first; at < end; at += kBatch * kStep) {
    Word<P> words[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (at + b * kStep < end) words[b] = load_word<P>(x + at + b * kStep);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (at + b * kStep >= end) continue;
      A values[N];
      widen_word<T>(words[b], values);
      add_deviations(values, pivot, sum, squares);
      ++packs;
    }
  }
  return moments_of(static_cast<A>(packs * N), pivot, sum, squares);
}

// Of all values of the threads that `sum_of` sums over, `count` of them; pivot: one of the values, the same for all
// threads. All threads get them.
template <class A, class Sum>
__device__ __forceinline__ Moments<A> combined_by(const Moments<A>& own, A pivot, A count, Sum sum_of) {
  const A mean = pivot + sum_of(own.count * (own.mean - pivot)) / count;
  const A deviation = own.mean - mean;
  return {count, mean, sum_of(own.squares + own.count * deviation * deviation)};
}

template <int THREADS, class A>
__device__ __forceinline__ Moments<A> combined(const Moments<A>& own, A pivot, A count, A* shared) {
  return combined_by(own, pivot, count, [&](A value) { return row_sum<THREADS>(value, shared); });
}

// Sums over `width` neighboring lanes, a power of two; all threads of a warp must call it.
template <class A>
__device__ __forceinline__ A team_sum(A value, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Of a row, from its parts, by `width` neighboring lanes, of which this is lane `member`. A row has `length` elements
// or positions, of `each` values.
template <class A>
__device__ __forceinline__ Moments<A> combined_parts(const GroupNorm& a, int64_t row, int64_t length, A each,
                                                     int member, int width) {
  using Pair = Pack<A, 2>;
  const A* partials = static_cast<const A*>(a.partials) + 2 * row * a.parts;
  const auto count_of = [&](int64_t part) {
    const int64_t left = length - part * a.part;
    return static_cast<A>(left < a.part ? left : a.part);
  };
  const A pivot = partials[0];
  A sum = 0;
  for (int64_t part = member; part < a.parts; part += width) {
    sum += count_of(part) * (partials[2 * part] - pivot);
  }
  const A mean = pivot + team_sum(sum, width) / static_cast<A>(length);
  A squares = 0;
  for (int64_t part = member; part < a.parts; part += width) {
    const Pair moments = load_pack<Pair>(partials + 2 * part);
    const A deviation = moments.v[0] - mean;
    squares += moments.v[1] + each * count_of(part) * deviation * deviation;
  }
  return {each * static_cast<A>(length), mean, team_sum(squares, width)};
}

template <class A>
__device__ __forceinline__ A rstd_of(const GroupNorm& a, const Moments<A>& moments) {
  return rsqrt(moments.squares / moments.count + static_cast<A>(a.eps));
}

template <class A>
__device__ __forceinline__ void leave_statistics(const GroupNorm& a, int64_t row, A mean, A rstd) {
  if (a.mean != nullptr) static_cast<A*>(a.mean)[row] = mean;
  if (a.rstd != nullptr) static_cast<A*>(a.rstd)[row] = rstd;
}

template <class A>
__device__ __forceinline__ void leave_partial(const GroupNorm& a, int64_t row, int64_t part,
                                              const Moments<A>& moments) {
  Pack<A, 2> pair;
  pair.v[0] = moments.mean;
  pair.v[1] = moments.squares;
  store_pack(static_cast<A*>(a.partials) + 2 * (row * a.parts + part), pair);
}

// y of the elements `begin` to `end` - 1 of a contiguous row. From the end on, which was read last for the moments, and
// which the cache therefore still has.
template <int act, class T, int N, int THREADS, class A>
__device__ __forceinline__ void normalize(const GroupNorm& a, int64_t row, int64_t begin, int64_t end, A mean, A rstd) {
  using P = Pack<T, N>;
  constexpr int64_t kStep = static_cast<int64_t>(THREADS) * N;
  const int64_t start = row * a.channels * a.inner;
  const T* x = static_cast<const T*>(a.x) + start;
  T* y = static_cast<T*>(a.y) + start;
  const int64_t first_channel = row % a.groups * a.channels;
  const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * N;
  const int64_t turns = static_cast<uint32_t>(end - begin - 1) / static_cast<uint32_t>(kBatch * kStep);
  for (int64_t at = first + turns * kBatch * kStep; at >= first; at -= kBatch * kStep) {
    Word<P> words[kBatch] = {};
    A scale[kBatch];
    A shift[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t col = at + b * kStep;
      scale[b] = rstd;
      shift[b] = 0;
      if (col >= end) continue;
      words[b] = load_word<P>(x + col);
      // A division of 64-bit integers for each access would cost more than the access.
      const int64_t channel = first_channel + static_cast<uint32_t>(col) / static_cast<uint32_t>(a.inner);
      if (a.weight != nullptr) scale[b] *= widen(static_cast<const T*>(a.weight)[channel]);
      if (a.bias != nullptr) shift[b] = widen(static_cast<const T*>(a.bias)[channel]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t col = at + b * kStep;
      if (col >= end) continue;
      A values[N];
      widen_word<T>(words[b], values);
#pragma unroll
      for (int j = 0; j < N; ++j) values[j] = (values[j] - mean) * scale[b] + shift[b];
      activate_as<act, T>(a.activation, values, static_cast<A>(a.slope));
      store<N>(y + col, values);
    }
  }
}

}  // namespace
}  // namespace kfc
