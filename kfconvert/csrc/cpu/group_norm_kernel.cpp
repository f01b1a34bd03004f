// y = act((x - mean) * rstd * weight + bias), mean and variance over the channels of a group (formulas:
// common/arguments.h). Two-pass statistics on a row that mostly stays in the cache; limited by memory
// bandwidth. Built once for each instruction set (KFC_CAPABILITY).
#include "channel_blocks.h"
#include "kernels.h"
#include "sums.h"

namespace {

template <class T>
void group_norm_range(const kfc::GroupNorm& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const int64_t cols = a.channels * a.inner;
  const A slope = static_cast<A>(a.slope);
  alignas(64) A scratch[kBlock];
  alignas(64) A values[kBlock];
  alignas(64) A scale[kBlock];
  alignas(64) A shift[kBlock];
  for (int64_t r = begin; r < end; ++r) {
    const T* x = static_cast<const T*>(a.x) + r * cols;
    T* y = static_cast<T*>(a.y) + r * cols;
    const Moments<A> moments = moments_of(x, cols, scratch);
    const double rstd = 1 / __builtin_sqrt(moments.variance + a.eps);
    if (a.mean != nullptr) static_cast<A*>(a.mean)[r] = moments.mean;
    if (a.rstd != nullptr) static_cast<A*>(a.rstd)[r] = static_cast<A>(rstd);
    for_channel_blocks(a.channels, a.inner, [&](int64_t channel, int64_t count, int64_t i, int64_t n) {
      scales_of_channels<T>(a, r, channel, count, rstd, values);
      repeat_each<A>(values, count, n, scale);
      shifts_of_channels<T>(a, r, channel, count, values);
      repeat_each<A>(values, count, n, shift);
      A* out = result_row(y + i, scratch);
      normalize_block<A>(as_accumulator(x + i, scratch, count * n), moments.mean, scale, shift, out, count * n);
      activate_row(a.activation, static_cast<const A*>(out), out, count * n, slope);
      store_result(out, y + i, count * n);
    });
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(group_norm)(const GroupNorm& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, group_norm_range<T>(a, begin, end));
}

}  // namespace kfc
