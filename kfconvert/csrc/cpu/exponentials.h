// Maxima of rows, and sums of exponentials of what is not above them.
#pragma once

#include <cmath>

#include "convert.h"

namespace {

// Four maxima, as each comparison waits for the last one with its maximum.
template <class A>
KFC_ROW A largest_of(const A* v, int64_t n, A largest) {
  const int64_t quarter = n / 4;
  A largest0 = largest;
  A largest1 = largest;
  A largest2 = largest;
  A largest3 = largest;
#pragma omp simd reduction(max : largest0, largest1, largest2, largest3)
  for (int64_t i = 0; i < quarter; ++i) {
    largest0 = v[i] > largest0 ? v[i] : largest0;
    largest1 = v[quarter + i] > largest1 ? v[quarter + i] : largest1;
    largest2 = v[2 * quarter + i] > largest2 ? v[2 * quarter + i] : largest2;
    largest3 = v[3 * quarter + i] > largest3 ? v[3 * quarter + i] : largest3;
  }
  for (int64_t i = 4 * quarter; i < n; ++i) largest0 = v[i] > largest0 ? v[i] : largest0;
  largest0 = largest1 > largest0 ? largest1 : largest0;
  largest2 = largest3 > largest2 ? largest3 : largest2;
  return largest2 > largest0 ? largest2 : largest0;
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
