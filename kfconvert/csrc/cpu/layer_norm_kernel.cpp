// s = x + residual; y = act((s - mean) * rstd * (weight + offset) + bias), with or without the mean, and its
// backward (formulas: common/arguments.h). Two-pass mean and variance on a row that stays in the cache; limited by
// memory bandwidth. Built once for each instruction set (KFC_CAPABILITY).
#include "kernels.h"
#include "norm_rows.h"
#include "scratch.h"

namespace {

// x + residual of rows first to first + rows - 1, for a layer norm rounded where it was stored for a backward.
template <class T, class A>
const A* load_sum(const kfc::LayerNorm& a, int64_t first, int64_t rows, const Scratch<A>& scratch) {
  const int64_t cols = a.cols;
  A* s = scratch.row(0);
  const A* x = as_accumulator(static_cast<const T*>(a.x) + first * cols, s, rows * cols);
  if (a.residual == nullptr) return x;
  for (int64_t i = 0; i < rows;) {
    const int64_t from = (first + i) % a.residual_rows;
    const int64_t count = a.residual_rows - from < rows - i ? a.residual_rows - from : rows - i;
    const T* residual = static_cast<const T*>(a.residual) + from * cols;
    add_rows(x + i * cols, as_accumulator(residual, scratch.row(1), count * cols), s + i * cols, count * cols);
    i += count;
  }
  if (a.sum == nullptr) return s;
  T* sum = static_cast<T*>(a.sum) + first * cols;
  store_row(static_cast<const A*>(s), sum, rows * cols);
  // The backward subtracts the mean from the sum as stored, so the mean must be that of the stored row: in a row of
  // almost equal values the difference of the two means would otherwise be all that is left.
  return a.centred && a.rstd != nullptr ? as_accumulator(static_cast<const T*>(sum), s, rows * cols) : s;
}

// Writes y and the statistics of rows first to first + rows - 1, whose elements are s, together at most a block. They
// are activated and stored all at once, as it takes twice as long one by one. `next` as for write_row.
template <class T, class A>
void write_short_rows(const kfc::LayerNorm& a, int64_t first, int64_t rows, const A* s, const A* weight, const A* bias,
                      const T* next) {
  alignas(64) A block[kBlock];
  const int64_t n = rows * a.cols;
  T* y = static_cast<T*>(a.y) + first * a.cols;
  A* out = result_row(y, block);
  if (next != nullptr) {
    fetch_ahead(next, n);
    fetch_ahead(y + n, n);
  }
  for (int64_t k = 0; k < rows; ++k) {
    const A* from = s + k * a.cols;
    const RowStatistics<A> row = statistics_of(a, first + k, from);
    normalize_row(from, row.mean, row.rstd, weight, bias, out + k * a.cols, a.cols);
  }
  activate_row(a.activation, static_cast<const A*>(out), out, n, static_cast<A>(a.slope));
  store_result(out, y, n);
}

template <class T>
void layer_norm_range(const kfc::LayerNorm& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const int64_t cols = a.cols;
  const int64_t together = cols <= kBlock / 2 ? kBlock / cols : 1;
  const Scratch<A> scratch(4, together * cols);
  const A* weight = load_weight<T>(a, scratch.row(2));
  const A* bias = load_affine<T>(a.bias, a, scratch.row(3));
  for (int64_t r = begin; r < end; r += together) {
    const int64_t rows = end - r < together ? end - r : together;
    const A* s = load_sum<T>(a, r, rows, scratch);
    const T* next = r + rows < end ? static_cast<const T*>(a.x) + (r + rows) * cols : nullptr;
    if (rows == 1) {
      write_row(a, r, s, weight, bias, next);
    } else {
      write_short_rows(a, r, rows, s, weight, bias, next);
    }
  }
}

// The row, or one that holds `value` everywhere.
template <class Row, class A>
Row* row_or(Row* row, A* scratch, A value, int64_t cols) {
  if (row != nullptr) return row;
  for (int64_t i = 0; i < cols; ++i) scratch[i] = value;
  return scratch;
}

// What a block adds to the sums of a row.
template <class A>
struct RowSums {
  A total;    // of gw
  A product;  // of gw * xhat
};

// gw[i] = g[i] * weight[i]; adds up g * xhat and g over the rows, with xhat = (s - mean) * rstd.
template <class A>
KFC_ROW RowSums<A> add_gradients(const A* s, A mean, A rstd, const A* g, const A* weight, A* sum_weight, A* sum_bias,
                                 A* gw, int64_t n) {
  A total = 0;
  A product = 0;
#pragma omp simd reduction(+ : total, product)
  for (int64_t i = 0; i < n; ++i) {
    const A xhat = (s[i] - mean) * rstd;
    const A of_y = g[i];
    const A of_xhat = of_y * weight[i];
    sum_weight[i] += of_y * xhat;
    sum_bias[i] += of_y;
    gw[i] = of_xhat;
    total += of_xhat;
    product += of_xhat * xhat;
  }
  return {total, product};
}

// out[i] = rstd * (gw[i] - total - xhat[i] * product)
template <class A>
KFC_ROW void gradient_of_row(const A* s, A mean, A rstd, const A* gw, A total, A product, A* out, int64_t n) {
  const A factor = rstd * product;
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = rstd * (gw[i] - total - (s[i] - mean) * factor);
}

template <class T>
void layer_norm_backward_range(const kfc::LayerNormBackward& a, int64_t begin, int64_t end, int64_t partial) {
  using A = typename Accumulate<T>::type;
  const int64_t cols = a.cols;
  const A slope = static_cast<A>(a.slope);
  const Scratch<A> scratch(5, cols);
  alignas(64) A s_block[kBlock];
  alignas(64) A g_block[kBlock];
  alignas(64) A v_block[kBlock];
  A* gw = scratch.row(0);
  const A* weight = row_or(load_weight<T>(a, scratch.row(1)), scratch.row(1), A(1), cols);
  const A* bias = load_affine<T>(a.bias, a, scratch.row(2));
  A* sum_weight = a.partial_weight == nullptr ? nullptr : static_cast<A*>(a.partial_weight) + partial * cols;
  A* sum_bias = a.partial_bias == nullptr ? nullptr : static_cast<A*>(a.partial_bias) + partial * cols;
  sum_weight = row_or(sum_weight, scratch.row(3), A(0), cols);
  sum_bias = row_or(sum_bias, scratch.row(4), A(0), cols);
  for (int64_t r = begin; r < end; ++r) {
    const A mean = a.mean == nullptr ? A(0) : static_cast<const A*>(a.mean)[r];
    const A rstd = static_cast<const A*>(a.rstd)[r];
    const T* s_row = static_cast<const T*>(a.s) + r * cols;
    const T* grad_row = static_cast<const T*>(a.grad) + r * cols;
    double total = 0;
    double product = 0;
    for (int64_t i = 0; i < cols; i += kBlock) {
      const int64_t n = cols - i < kBlock ? cols - i : kBlock;
      const A* s = as_accumulator(s_row + i, s_block, n);
      const A* g = as_accumulator(grad_row + i, g_block, n);
      if (a.activation != kNone) {
        normalize_row(s, mean, rstd, weight + i, at(bias, i), v_block, n);
        activate_backward_from_input_row(a.activation, g, static_cast<const A*>(v_block), g_block, n, slope);
        g = g_block;
      }
      const RowSums<A> sums = add_gradients(s, mean, rstd, g, weight + i, sum_weight + i, sum_bias + i, gw + i, n);
      total += static_cast<double>(sums.total);
      product += static_cast<double>(sums.product);
    }
    const A mean_gw = a.mean == nullptr ? A(0) : static_cast<A>(total / static_cast<double>(cols));
    const A mean_product = static_cast<A>(product / static_cast<double>(cols));
    T* to = static_cast<T*>(a.grad_x) + r * cols;
    for (int64_t i = 0; i < cols; i += kBlock) {
      const int64_t n = cols - i < kBlock ? cols - i : kBlock;
      A* out = result_row(to + i, g_block);
      gradient_of_row(as_accumulator(s_row + i, s_block, n), mean, rstd, static_cast<const A*>(gw) + i, mean_gw,
                      mean_product, out, n);
      if (a.grad_sum != nullptr) {
        const A* others = as_accumulator(static_cast<const T*>(a.grad_sum) + r * cols + i, s_block, n);
        add_rows(static_cast<const A*>(out), others, out, n);
      }
      store_result(out, to + i, n);
    }
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(layer_norm)(const LayerNorm& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, layer_norm_range<T>(a, begin, end));
}

void KFC_FOR_CAPABILITY(layer_norm_backward)(const LayerNormBackward& a, int64_t begin, int64_t end, int64_t partial) {
  KFC_DISPATCH_DTYPE(a.dtype, layer_norm_backward_range<T>(a, begin, end, partial));
}

}  // namespace kfc
