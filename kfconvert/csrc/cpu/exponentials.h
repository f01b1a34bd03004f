// Maxima of rows, and sums of exp(element - maximum).
#pragma once

#include <cmath>

#include "vectors.h"

namespace {

// The largest of all v[i] and of `largest`; a NaN does not count.
template <class A>
KFC_ROW A largest_of(const A* v, int64_t n, A largest) {
  const Vector<A> known = Vector<A>{} + largest;
  Vector<A> maxima[kChains] = {known, known, known, known};
  in_vectors<A>(n, [&](int k, auto load) {
    const Vector<A> x = load(v, largest);
    maxima[k] = x > maxima[k] ? x : maxima[k];
  });
  for (int k = 1; k < kChains; ++k) maxima[0] = maxima[k] > maxima[0] ? maxima[k] : maxima[0];
  return across<A>(maxima[0], [](auto a, auto b) { return b > a ? b : a; });
}

// As exponentials_row, for elements that fill whole vectors.
template <class A>
KFC_FN double exponentials(const A* v, A* out, int64_t n, A largest) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) {
    out[i] = Math<A>::exp_or_zero(v[i] - largest);
    total += out[i];
  }
  return total;
}

// out[i] = exp(v[i] - largest); returns their sum, in double: in float, small terms would lose digits when they are
// added to the largest one, which is 1
template <class A>
KFC_ROW double exponentials_row(const A* v, A* out, int64_t n, A largest) {
  const int64_t whole = n / kWidth<A> * kWidth<A>;
  double total = exponentials(v, out, whole, largest);
  const int rest = static_cast<int>(n - whole);
  if (rest > 0) {
    A last[kWidth<A>];
    store_vector<A>(load_first(v + whole, rest, A(-INFINITY)), last);  // beyond the end there will be zeros
    total += exponentials(static_cast<const A*>(last), last, kWidth<A>, largest);
    store_first<A>(load_vector(static_cast<const A*>(last)), out + whole, rest);
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
    // In a block of only -inf and NaN, exp(-inf - 0) is 0, so that only the NaN count.
    total += exponentials_row(v, scratch, n, next == A(-INFINITY) ? A(0) : next);
  }
};

}  // namespace
