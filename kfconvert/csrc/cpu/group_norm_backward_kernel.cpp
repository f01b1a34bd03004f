// The gradients of act((x - mean) * rstd * weight + bias), mean and variance over the channels of a group (formulas:
// common/arguments.h). A row is read twice, the second time mostly from the cache; limited by memory bandwidth, with an
// activation by its arithmetic. Built once for each instruction set (KFC_CAPABILITY).
#include "channel_blocks.h"
#include "kernels.h"
#include "scratch.h"
#include "sums.h"

namespace {

// products[c] = sum of g * (x - mean) and totals[c] = sum of g, over the n elements of each of `count` channels
template <class A>
KFC_ROW void sums_of_channels(const A* x, A mean, const A* g, int64_t count, int64_t n, A* products, A* totals) {
  for (int64_t c = 0; c < count; ++c) {
    A product = 0;
    A total = 0;
#pragma omp simd reduction(+ : product, total)
    for (int64_t i = c * n; i < (c + 1) * n; ++i) {
      product += g[i] * (x[i] - mean);
      total += g[i];
    }
    products[c] = product;
    totals[c] = total;
  }
}

// out[i] = g[i] * scale[i] - shift - (x[i] - mean) * factor
template <class A>
KFC_ROW void gradient_of_block(const A* x, A mean, const A* g, const A* scale, A shift, A factor, A* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = g[i] * scale[i] - shift - (x[i] - mean) * factor;
}

template <class T>
void group_norm_backward_range(const kfc::GroupNormBackward& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const int64_t cols = a.channels * a.inner;
  const A slope = static_cast<A>(a.slope);
  // g of a row: in grad_x, in scratch where that is of a half type, or grad itself where there is no activation.
  const bool is_grad = a.activation == kNone;
  const Scratch<A> scratch(1, is_grad || __is_same(T, A) ? 0 : cols);
  const Scratch<double> sums(2, a.channels);
  alignas(64) A x_block[kBlock];
  alignas(64) A g_block[kBlock];
  alignas(64) A v_block[kBlock];
  alignas(64) A scale[kBlock];
  alignas(64) A shift[kBlock];
  alignas(64) A scales[kBlock];  // of channels, as those that follow
  alignas(64) A products[kBlock];
  alignas(64) A totals[kBlock];
  for (int64_t r = begin; r < end; ++r) {
    const T* x_row = static_cast<const T*>(a.x) + r * cols;
    const T* grad_row = static_cast<const T*>(a.grad) + r * cols;
    T* grad_x = static_cast<T*>(a.grad_x) + r * cols;
    A* g_row = result_row(grad_x, scratch.row(0));
    const A mean = static_cast<const A*>(a.mean)[r];
    // The gradient of a row of a single element is 0; an rstd of 0 keeps rounding errors out of it.
    const double rstd = cols == 1 ? A(0) : static_cast<const A*>(a.rstd)[r];
    double* row_products = sums.row(0);
    double* row_totals = sums.row(1);
    for (int64_t c = 0; c < a.channels; ++c) row_products[c] = row_totals[c] = 0;
    double scaled_product = 0;  // sums over the row of g * scale * (x - mean) and of g * scale
    double scaled_total = 0;
    for_channel_blocks(a.channels, a.inner, [&](int64_t channel, int64_t count, int64_t i, int64_t n) {
      const A* x = as_accumulator(x_row + i, x_block, count * n);
      const A* g = as_accumulator(grad_row + i, g_block, count * n);
      scales_of_channels<T>(a, r, channel, count, rstd, scales);
      if (!is_grad) {
        repeat_each<A>(scales, count, n, scale);
        shifts_of_channels<T>(a, r, channel, count, totals);
        repeat_each<A>(totals, count, n, shift);
        normalize_block<A>(x, mean, scale, shift, v_block, count * n);
        activate_backward_from_input_row<A>(a.activation, g, v_block, g_row + i, count * n, slope);
        g = g_row + i;
      }
      sums_of_channels(x, mean, g, count, n, products, totals);
      for (int64_t c = 0; c < count; ++c) {
        const double product = products[c];
        const double total = totals[c];
        row_products[channel + c] += product;
        row_totals[channel + c] += total;
        scaled_product += scales[c] * product;
        scaled_total += scales[c] * total;
      }
    });
    for (int64_t c = 0; c < a.channels; ++c) {
      static_cast<A*>(a.sums_weight)[r * a.channels + c] = static_cast<A>(rstd * row_products[c]);
      static_cast<A*>(a.sums_bias)[r * a.channels + c] = static_cast<A>(row_totals[c]);
    }
    const A mean_g = static_cast<A>(scaled_total / static_cast<double>(cols));
    const A factor = static_cast<A>(rstd * rstd * (scaled_product / static_cast<double>(cols)));
    for_channel_blocks(a.channels, a.inner, [&](int64_t channel, int64_t count, int64_t i, int64_t n) {
      const A* x = as_accumulator(x_row + i, x_block, count * n);
      const A* g = is_grad ? as_accumulator(grad_row + i, g_block, count * n) : g_row + i;
      scales_of_channels<T>(a, r, channel, count, rstd, scales);
      repeat_each<A>(scales, count, n, scale);
      A* out = result_row(grad_x + i, g_block);
      gradient_of_block<A>(x, mean, g, scale, mean_g, factor, out, count * n);
      store_result(out, grad_x + i, count * n);
    });
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(group_norm_backward)(const GroupNormBackward& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, group_norm_backward_range<T>(a, begin, end));
}

}  // namespace kfc
