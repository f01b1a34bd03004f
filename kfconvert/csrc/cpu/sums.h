// Sums over rows: that of a block in the accumulation type, that of the blocks in double, as a row may have a million
// elements. Mean and variance of rows, in two passes.
#pragma once

#include "convert.h"

namespace {

// The sum of term(i) for i less than n, which is at most kBlock. Four sums, as each addition waits for the last one to
// its sum, and as each then has a quarter of the roundings.
template <class A, class Term>
KFC_FN A sum_terms(int64_t n, Term term) {
  const int64_t quarter = n / 4;
  A sum0 = 0;
  A sum1 = 0;
  A sum2 = 0;
  A sum3 = 0;
#pragma omp simd reduction(+ : sum0, sum1, sum2, sum3)
  for (int64_t i = 0; i < quarter; ++i) {
    sum0 += term(i);
    sum1 += term(quarter + i);
    sum2 += term(2 * quarter + i);
    sum3 += term(3 * quarter + i);
  }
  for (int64_t i = 4 * quarter; i < n; ++i) sum0 += term(i);
  return (sum0 + sum1) + (sum2 + sum3);
}

// The sum of v[i]
template <class A>
KFC_ROW A sum_of(const A* v, int64_t n) {
  return sum_terms<A>(n, [=](int64_t i) { return v[i]; });
}

// The sum of v[i] - shift
template <class A>
KFC_ROW A sum_from(const A* v, A shift, int64_t n) {
  return sum_terms<A>(n, [=](int64_t i) { return v[i] - shift; });
}

// The sum of (v[i] - mean)^2
template <class A>
KFC_ROW A sum_of_squares(const A* v, A mean, int64_t n) {
  return sum_terms<A>(n, [=](int64_t i) { return (v[i] - mean) * (v[i] - mean); });
}

// The sum of a[i] * b[i]
template <class A>
KFC_ROW A sum_of_products(const A* a, const A* b, int64_t n) {
  return sum_terms<A>(n, [=](int64_t i) { return a[i] * b[i]; });
}

// Sixteen additions for each lane of the four sums of sum_terms, so that rounding stays below 3e-7 of a sum even where the
// terms, and with them all roundings, are alike.
#if defined(__AVX512F__)
constexpr int64_t kSumBlock = 1024;
#elif defined(__AVX2__)
constexpr int64_t kSumBlock = 512;
#else
constexpr int64_t kSumBlock = 256;
#endif
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
    squares += static_cast<double>(sum_of_squares(v, mean, n));
    return sum_from(v, mean, n);
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
  const auto squares = [](const A* v, int64_t n) { return sum_of_squares(v, A(0), n); };
  return {A(0), sum_blocks(x, cols, scratch, squares) / static_cast<double>(cols)};
}

}  // namespace
