// total[col] = the sum of partials[p][col] over p: the end of backward passes whose threads have sums of their own.
// Built once for each instruction set.
#include "kernels.h"
#include "convert.h"

namespace {

template <class A, class T>
void add_up(const kfc::PartialSums& a) {
  alignas(64) A sums[kBlock];
  T* total = static_cast<T*>(a.total);
  for (int64_t col = 0; col < a.cols; col += kBlock) {
    const int64_t n = a.cols - col < kBlock ? a.cols - col : kBlock;
    for (int64_t i = 0; i < n; ++i) sums[i] = 0;
    for (int64_t p = 0; p < a.count; ++p) {
      add_rows(static_cast<const A*>(sums), static_cast<const A*>(a.partials) + p * a.cols + col, sums, n);
    }
    if constexpr (sizeof(T) < 4 && sizeof(A) == 8) {
      alignas(64) float narrower[kBlock];
      load_row(sums, narrower, n);
      store_row(narrower, total + col, n);
    } else {
      store_row(sums, total + col, n);
    }
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(sum_partials)(const PartialSums& a) {
  if (a.dtype == DType::f64) {
    KFC_DISPATCH_DTYPE(a.out, (add_up<double, T>(a)));
  } else {
    KFC_DISPATCH_DTYPE(a.out, (add_up<float, T>(a)));
  }
}

}  // namespace kfc
