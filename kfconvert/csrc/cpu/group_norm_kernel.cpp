// y = act((x - mean) * rstd * weight + bias), mean and variance over the channels of a group (formulas:
// common/arguments.h). Two-pass statistics on a row that mostly stays in the cache; limited by memory
// bandwidth. Built once for each instruction set (KFC_CAPABILITY).
#include "convert.h"
#include "kernels.h"

namespace {

// The sum of a block is taken in the accumulation type, the sum of the blocks in double: a row may have a million
// elements.

template <class A>
KFC_ROW double sum_block(const A* x, int64_t n) {
  A total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += x[i];
  return total;
}

// Adds the deviations from `mean` to `sum`, their squares to `squares`.
template <class A>
KFC_ROW void add_deviations(const A* x, A mean, int64_t n, double& sum, double& squares) {
  A first = 0;
  A second = 0;
#pragma omp simd reduction(+ : first, second)
  for (int64_t i = 0; i < n; ++i) {
    const A deviation = x[i] - mean;
    first += deviation;
    second += deviation * deviation;
  }
  sum += first;
  squares += second;
}

template <class A>
KFC_ROW void normalize_block(const A* x, A mean, A scale, A shift, A* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = (x[i] - mean) * scale + shift;
}

template <class T>
void group_norm_range(const kfc::GroupNorm& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const int64_t cols = a.channels * a.inner;
  const A slope = static_cast<A>(a.slope);
  alignas(64) A scratch[kBlock];
  A value;
  for (int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(a.x) + r * cols;
    T* y = static_cast<T*>(a.y) + r * cols;
    double total = 0;
    for (int64_t i = 0; i < cols; i += kBlock) {
      const int64_t n = cols - i < kBlock ? cols - i : kBlock;
      total += sum_block(as_accumulator(x + i, scratch, n), n);
    }
    A mean = static_cast<A>(total / static_cast<double>(cols));
    double sum = 0;
    double squares = 0;
    for (int64_t i = 0; i < cols; i += kBlock) {
      const int64_t n = cols - i < kBlock ? cols - i : kBlock;
      add_deviations(as_accumulator(x + i, scratch, n), mean, n, sum, squares);
    }
    // Else what rounding left over in the mean would be all there is of a row of equal values.
    const double correction = sum / static_cast<double>(cols);
    mean += static_cast<A>(correction);
    const double variance = squares / static_cast<double>(cols) - correction * correction;
    const double rstd = 1 / __builtin_sqrt((variance < 0 ? 0 : variance) + a.eps);
    for (int64_t c = 0; c < a.channels; ++c) {
      const int64_t channel = r % a.groups * a.channels + c;
      const auto affine = [&](const void* from) -> A {
        return *as_accumulator(static_cast<const T*>(from) + channel, &value, 1);
      };
      const A scale = static_cast<A>(a.weight == nullptr ? rstd : rstd * affine(a.weight));
      const A shift = a.bias == nullptr ? A(0) : affine(a.bias);
      for (int64_t i = c * a.inner; i < (c + 1) * a.inner; i += kBlock) {
        const int64_t left = (c + 1) * a.inner - i;
        const int64_t n = left < kBlock ? left : kBlock;
        A* out = result_row(y + i, scratch);
        normalize_block(as_accumulator(x + i, scratch, n), mean, scale, shift, out, n);
        activate_row(a.activation, static_cast<const A*>(out), out, n, slope);
        store_result(out, y + i, n);
      }
    }
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(group_norm)(const GroupNorm& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, group_norm_range<T>(a, begin, end));
}

}  // namespace kfc
