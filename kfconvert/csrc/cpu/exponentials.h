// Sums of exponentials over long rows.
#pragma once

#include <cmath>

#include "convert.h"

namespace {

template <class A>
KFC_FN A largest_of(const A* v, int64_t n, A largest) {
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < n; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

// out[i] = exp(v[i] - largest); returns their sum, in double: beside the one that is 1 the others lose their digits
template <class A>
KFC_ROW double exponentials_row(const A* v, A* out, int64_t n, A largest) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Math<A>::exp(v[i] - largest);
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
