// Sums over rows: that of a block in the accumulation type, that of the blocks in double, as a row may have a million
// elements. Mean and variance of rows, in two passes.
#pragma once

#include "lanes.h"

namespace {

// The sum of term(i) for i less than n, which is at most kBlock. Each lane has its share of the terms and of the
// roundings.
template <class A, class Term>
KFC_FN A sum_terms(int64_t n, Term term) {
  A sums[kRowLanes] = {};
  in_lanes(n, [&](int lane, int64_t i) { sums[lane] += term(i); });
  return sum_of_lanes(sums);
}

// The sum of v[i]
template <class A>
KFC_ROW A sum_of(const A* v, int64_t n) {
  return sum_terms<A>(n, [=](int64_t i) { return v[i]; });
}

template <class A>
struct Deviations {
  A sum;      // of v[i] - mean
  A squares;  // of (v[i] - mean)^2
};

template <class A>
KFC_ROW Deviations<A> deviations_from(const A* v, A mean, int64_t n) {
  A sums[kRowLanes] = {};
  A squares[kRowLanes] = {};
  in_lanes(n, [&](int lane, int64_t i) {
    const A deviation = v[i] - mean;
    sums[lane] += deviation;
    squares[lane] += deviation * deviation;
  });
  return {sum_of_lanes(sums), sum_of_lanes(squares)};
}

// The sum of v[i]^2
template <class A>
KFC_ROW A sum_of_squares(const A* v, int64_t n) {
  return sum_terms<A>(n, [=](int64_t i) { return v[i] * v[i]; });
}

// The sum of a[i] * b[i]
template <class A>
KFC_ROW A sum_of_products(const A* a, const A* b, int64_t n) {
  return sum_terms<A>(n, [=](int64_t i) { return a[i] * b[i]; });
}

// Sixteen additions for each lane, so that rounding stays below 3e-7 of a sum even where the terms, and with them all
// roundings, are alike.
constexpr int64_t kSumBlock = 16 * kRowLanes;
static_assert(kSumBlock <= kBlock);

// The sum of block(v, n) over the blocks of a row; `scratch` holds one.
template <class T, class A, class Block>
double sum_blocks(const T* x, int64_t cols, A* scratch, Block block) {
  double total = 0;
  for (int64_t i = 0; i < cols; i += kSumBlock) {
    const int64_t n = cols - i < kSumBlock ? cols - i : kSumBlock;
    total += static_cast<double>(block(as_accumulator(x + i, scratch, n), n));
  }
  return total;
}

template <class A>
struct Moments {
  A mean;
  double variance;
};

template <class T, class A>
Moments<A> moments_of(const T* x, int64_t cols, A* scratch) {
  const double count = static_cast<double>(cols);
  A mean = static_cast<A>(sum_blocks(x, cols, scratch, [](const A* v, int64_t n) { return sum_of(v, n); }) / count);
  double squares = 0;
  const double left = sum_blocks(x, cols, scratch, [&](const A* v, int64_t n) {
    const Deviations<A> deviations = deviations_from(v, mean, n);
    squares += static_cast<double>(deviations.squares);
    return deviations.sum;
  });
  // Else what rounding left over in the mean would be all there is of a row of equal values.
  const double correction = left / count;
  mean += static_cast<A>(correction);
  const double variance = squares / count - correction * correction;
  return {mean, variance < 0 ? 0 : variance};
}

// The same where the mean counts as 0.
template <class T, class A>
Moments<A> moments_about_zero(const T* x, int64_t cols, A* scratch) {
  const auto squares = [](const A* v, int64_t n) { return sum_of_squares(v, n); };
  return {A(0), sum_blocks(x, cols, scratch, squares) / static_cast<double>(cols)};
}

}  // namespace
