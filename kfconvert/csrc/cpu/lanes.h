// Passes over rows: sums and maxima of a block as many running ones, in lanes of vectors; memory asked for ahead.
#pragma once

#include "convert.h"

namespace {

// Four vectors of float, as each addition waits for the last one to its vector.
#if defined(__AVX512F__)
constexpr int kRowLanes = 64;
#elif defined(__AVX2__)
constexpr int kRowLanes = 32;
#else
constexpr int kRowLanes = 16;
#endif

// step(i % kRowLanes, i) for i less than n, in the order of memory: a row that is read in several places at a time, all
// in one page, is no stream to a CPU, which then fetches nothing ahead.
template <class Step>
KFC_FN void in_lanes(int64_t n, Step step) {
  int64_t i = 0;
  for (; i + kRowLanes <= n; i += kRowLanes) {
#pragma omp simd
    for (int lane = 0; lane < kRowLanes; ++lane) step(lane, i + lane);
  }
  const int rest = static_cast<int>(n - i);
#pragma omp simd
  for (int lane = 0; lane < rest; ++lane) step(lane, i + lane);
}

template <class A>
KFC_FN A sum_of_lanes(A* lanes) {
#pragma GCC unroll 8
  for (int width = kRowLanes / 2; width > 0; width /= 2) {
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[width + lane];
  }
  return lanes[0];
}

// Asks for n elements that are read or written next, in another pass: to wait for them takes up to a fifth of the time.
template <class T>
KFC_FN void fetch_ahead(const T* from, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(from + i);
}

}  // namespace
