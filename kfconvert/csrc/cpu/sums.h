// Sums over rows. A block is summed up in the accumulation type, and the blocks in double, as a row may have a million
// elements. Mean and variance of rows, in two passes.
#pragma once

#include "vectors.h"

namespace {

// The sum of term(load) for the vectors of a row of at most kBlock elements, where load(row) gives those elements of a
// row, and zeros beyond its end.
template <class A, class Term>
KFC_FN A sum_vectors(int64_t n, Term term) {
  Vector<A> sums[kChains] = {};
  in_vectors<A>(n, [&](int k, auto load) { sums[k] += term([&](const A* row) { return load(row, A(0)); }); });
  return sum_of_chains<A>(sums);
}

// The sum of v[i]
template <class A>
KFC_ROW A sum_of(const A* v, int64_t n) {
  return sum_vectors<A>(n, [=](auto load) { return load(v); });
}

template <class A>
struct Deviations {
  A sum;      // of v[i] - mean
  A squares;  // of (v[i] - mean)^2
};

template <class A>
KFC_ROW Deviations<A> deviations_from(const A* v, A mean, int64_t n) {
  Vector<A> sums[kChains] = {};
  Vector<A> squares[kChains] = {};
  in_vectors<A>(n, [&](int k, auto load) {
    const Vector<A> deviation = load(v, mean) - mean;
    sums[k] += deviation;
    squares[k] += deviation * deviation;
  });
  return {sum_of_chains<A>(sums), sum_of_chains<A>(squares)};
}

// The sum of v[i]^2
template <class A>
KFC_ROW A sum_of_squares(const A* v, int64_t n) {
  return sum_vectors<A>(n, [=](auto load) {
    const Vector<A> x = load(v);
    return x * x;
  });
}

// The sum of a[i] * b[i]
template <class A>
KFC_ROW A sum_of_products(const A* a, const A* b, int64_t n) {
  return sum_vectors<A>(n, [=](auto load) { return load(a) * load(b); });
}

// For a block of so many elements, each element of a vector of float sums up sixteen terms, or a few more. So the
// rounding error is near 3e-7 of a sum at most, even where the terms, and with them all roundings, are alike.
constexpr int64_t kSumBlock = 16 * kChains * kWidth<float>;
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
  const double inverse = 1 / static_cast<double>(cols);
  A mean = static_cast<A>(sum_blocks(x, cols, scratch, [](const A* v, int64_t n) { return sum_of(v, n); }) * inverse);
  double squares = 0;
  const double left = sum_blocks(x, cols, scratch, [&](const A* v, int64_t n) {
    const Deviations<A> deviations = deviations_from(v, mean, n);
    squares += static_cast<double>(deviations.squares);
    return deviations.sum;
  });
  // Without this correction the result for a row of equal values would be nothing but the rounding error of its mean.
  const double correction = left * inverse;
  mean += static_cast<A>(correction);
  const double variance = squares * inverse - correction * correction;
  return {mean, variance < 0 ? 0 : variance};
}

// The same where the mean counts as 0.
template <class T, class A>
Moments<A> moments_about_zero(const T* x, int64_t cols, A* scratch) {
  const auto squares = [](const A* v, int64_t n) { return sum_of_squares(v, n); };
  return {A(0), sum_blocks(x, cols, scratch, squares) / static_cast<double>(cols)};
}

}  // namespace
