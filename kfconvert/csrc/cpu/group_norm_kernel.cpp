// y = act((x - mean) * rstd * weight + bias), mean and variance over the channels of a group (formulas:
// common/arguments.h). Two-pass statistics on a row that mostly stays in the cache; limited by memory
// bandwidth. Built once for each instruction set (KFC_CAPABILITY).
#include "kernels.h"
#include "sums.h"

namespace {

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
    const Moments<A> moments = moments_of(x, cols, scratch);
    const double rstd = 1 / __builtin_sqrt(moments.variance + a.eps);
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
        normalize_block(as_accumulator(x + i, scratch, n), moments.mean, scale, shift, out, n);
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
