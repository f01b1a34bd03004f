// Maxima of rows, and sums of exponentials of what is not above them.
#pragma once

#include <cmath>

#include "lanes.h"

namespace {

// The largest of v[i] and of `largest`; no NaN.
template <class A>
KFC_ROW A largest_of(const A* v, int64_t n, A largest) {
  A maxima[kRowLanes];
  for (A& maximum : maxima) maximum = largest;
  in_lanes(n, [&](int lane, int64_t i) { maxima[lane] = v[i] > maxima[lane] ? v[i] : maxima[lane]; });
#pragma GCC unroll 8
  for (int width = kRowLanes / 2; width > 0; width /= 2) {
#pragma omp simd
    for (int lane = 0; lane < width; ++lane) {
      maxima[lane] = maxima[width + lane] > maxima[lane] ? maxima[width + lane] : maxima[lane];
    }
  }
  return maxima[0];
}

// out[i] = exp(v[i] - largest); returns their sum, in double: beside the one that is 1 the others lose their digits
template <class A>
KFC_ROW double exponentials_row(const A* v, A* out, int64_t n, A largest) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Math<A>::exp_or_zero(v[i] - largest);
    total += out[i];
  }
  return total;
}

// sum(exp(v - largest)) of values that come one block after the other (Milakov and Gimelshein, "Online normalizer
// calculation for softmax", 2018); `scratch` holds a block.
template <class A>
struct OnlineSum {
  A largest = -INFINITY;
  double total = 0;

  void add(const A* v, A* scratch, int64_t n) {
    const A next = largest_of(v, n, largest);
    if (next > largest) total *= Math<A>::exp(largest - next);
    largest = next;
    // Of a block of nothing but -inf and NaN only the NaN count.
    total += exponentials_row(v, scratch, n, next == A(-INFINITY) ? A(0) : next);
  }
};

}  // namespace
