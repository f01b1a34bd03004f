// total[col] = the sum of partials[p][col] over p, in double: the end of backward passes whose threads, or images, have
// sums of their own. Built once for each instruction set.
#include "convert.h"
#include "kernels.h"

namespace {

// A is the type of the partials.
template <class A, class T>
void add_up(const kfc::PartialSums& a, int64_t begin, int64_t end) {
  alignas(64) double sums[kBlock];
  alignas(64) typename Accumulate<T>::type rounded[kBlock];
  const A* partials = static_cast<const A*>(a.partials);
  for (int64_t col = begin; col < end; col += kBlock) {
    const int64_t n = end - col < kBlock ? end - col : kBlock;
    for (int64_t i = 0; i < n; ++i) sums[i] = 0;
    for (int64_t p = 0; p < a.count; ++p) {
      const A* row = partials + p * a.cols + col;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) sums[i] += static_cast<double>(row[i]);
    }
    load_row(static_cast<const double*>(sums), rounded, n);
    store_row(rounded, static_cast<T*>(a.total) + col, n);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(sum_partials)(const PartialSums& a, int64_t begin, int64_t end) {
  if (a.dtype == DType::f64) {
    KFC_DISPATCH_DTYPE(a.out, (add_up<double, T>(a, begin, end)));
  } else {
    KFC_DISPATCH_DTYPE(a.out, (add_up<float, T>(a, begin, end)));
  }
}

}  // namespace kfc
