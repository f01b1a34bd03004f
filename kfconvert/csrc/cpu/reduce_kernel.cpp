// Sums over rows, or over parts of rows, of squares, magnitudes or squared differences: one pass over memory,
// limited by its bandwidth. Built once for each instruction set.
#include "../common/reduce_terms.h"
#include "kernels.h"
#include "sums.h"

namespace {

constexpr int64_t kShortRow = 16;  // a vector of float, of AVX-512

template <class F, class A>
KFC_ROW A block_sum(const A* x, const A* other, int64_t n) {
  return sum_vectors<A>(n, [=](auto load) { return F::of(load(x), load(other)); });
}

// sums[r] = the sum of row r. Vectors of rows, as a sum across a vector costs more than so short a row.
template <class F, class A>
KFC_ROW void short_row_sums(const A* x, const A* other, A* sums, int rows, int cols) {
  for (int r = 0; r < rows; ++r) sums[r] = 0;
  int c = 0;
  for (; c + 4 <= cols; c += 4) {
#pragma omp simd
    for (int r = 0; r < rows; ++r) {
      const int at = r * cols + c;
      sums[r] += (F::of(x[at], other[at]) + F::of(x[at + 1], other[at + 1])) +
                 (F::of(x[at + 2], other[at + 2]) + F::of(x[at + 3], other[at + 3]));
    }
  }
  for (; c < cols; ++c) {
#pragma omp simd
    for (int r = 0; r < rows; ++r) sums[r] += F::of(x[r * cols + c], other[r * cols + c]);
  }
}

template <class A, class T>
void write_as(A* sums, double factor, T* y, int64_t n) {
  // In double, so that 1 / n is not rounded first.
  for (int64_t i = 0; i < n; ++i) sums[i] = static_cast<A>(static_cast<double>(sums[i]) * factor);
  store_row(sums, y, n);
}

// y[at + i] = factor * sums[i]
template <class A>
void write_results(const kfc::Reduce& a, A* sums, int64_t at, int64_t n) {
  if constexpr (sizeof(A) == 8) {
    write_as(sums, a.factor, static_cast<double*>(a.y) + at, n);
  } else if (a.out == kfc::DType::f32) {
    write_as(sums, a.factor, static_cast<float*>(a.y) + at, n);
  } else if (a.out == kfc::DType::f16) {
    write_as(sums, a.factor, static_cast<Float16*>(a.y) + at, n);
  } else {
    write_as(sums, a.factor, static_cast<BFloat16*>(a.y) + at, n);
  }
}

// As many rows at a time as a block holds; a row is not longer than kSumBlock.
template <class F, class T>
void reduce_short_rows(const kfc::Reduce& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  alignas(64) A x_scratch[kBlock];
  alignas(64) A other_scratch[kBlock];
  alignas(64) A sums[kBlock];
  const int64_t most = kBlock / a.cols;
  for (int64_t row = begin; row < end; row += most) {
    const int64_t rows = end - row < most ? end - row : most;
    const int64_t n = rows * a.cols;
    const A* x = as_accumulator(static_cast<const T*>(a.x) + row * a.cols, x_scratch, n);
    const A* other = x;
    if (F::binary) other = as_accumulator(static_cast<const T*>(a.other) + row * a.cols, other_scratch, n);
    if (a.cols <= kShortRow) {
      short_row_sums<F>(x, other, sums, static_cast<int>(rows), static_cast<int>(a.cols));
    } else {
      for (int64_t r = 0; r < rows; ++r) sums[r] = block_sum<F>(x + r * a.cols, other + r * a.cols, a.cols);
    }
    write_results(a, sums, row, rows);
  }
}

template <class F, class T>
void reduce_range(const kfc::Reduce& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  if (a.parts == 1 && a.cols > 0 && a.cols <= kSumBlock) return reduce_short_rows<F, T>(a, begin, end);
  alignas(64) A x_scratch[kBlock];
  alignas(64) A other_scratch[kBlock];
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t row = piece / a.parts;
    const int64_t first = (piece - row * a.parts) * a.part;
    const int64_t cols = first + a.part < a.cols ? a.part : a.cols - first;
    const T* x_row = static_cast<const T*>(a.x) + row * a.cols + first;
    const T* other_row = F::binary ? static_cast<const T*>(a.other) + row * a.cols + first : x_row;
    double total = 0;
    for (int64_t i = 0; i < cols; i += kSumBlock) {
      const int64_t n = cols - i < kSumBlock ? cols - i : kSumBlock;
      const A* x = as_accumulator(x_row + i, x_scratch, n);
      const A* other = F::binary ? as_accumulator(other_row + i, other_scratch, n) : x;
      total += static_cast<double>(block_sum<F>(x, other, n));
    }
    A sum[1] = {static_cast<A>(total)};
    write_results(a, sum, piece, 1);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(reduce)(const Reduce& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_TERM(a.term, KFC_DISPATCH_DTYPE(a.dtype, (reduce_range<F, T>(a, begin, end))));
}

}  // namespace kfc
