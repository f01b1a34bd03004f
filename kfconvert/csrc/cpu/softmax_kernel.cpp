// y = softmax(x * scale + mask), or with grad: y = scale * x * (grad - sum(grad * x)), 0 where a boolean mask is False,
// row by row. Rows of up to 8192 elements are computed in cache; longer ones are read twice. Built once for each
// instruction set.
#include "../common/arguments.h"
#include "exponentials.h"
#include "fetch_ahead.h"
#include "kernels.h"
#include "sums.h"

namespace {

constexpr int64_t kShortRow = 8192;

// Of the block of a row that begins at element `col`.
int64_t block_length(const kfc::Softmax& a, int64_t col) { return a.cols - col < kBlock ? a.cols - col : kBlock; }

// Where the mask of a row begins, in elements.
int64_t mask_offset(const kfc::RowMask& m, int64_t row) {
  int64_t at = 0;
  for (int i = m.dims - 1; i >= 0; --i) {
    const int64_t outer = row / m.sizes[i];
    at += (row - outer * m.sizes[i]) * m.strides[i];
    row = outer;
  }
  return at;
}

// out[i] = x[i], or `hidden` where a boolean mask, which begins at element `at` for this block, is False
template <class A>
void hide_row(const kfc::RowMask& m, int64_t at, const A* x, A hidden, A* out, int64_t n) {
  const uint8_t* mask = static_cast<const uint8_t*>(m.data) + at;
  if (m.inner == 1) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = mask[i] != 0 ? x[i] : hidden;
  } else {
    const bool kept = *mask != 0;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = kept ? x[i] : hidden;
  }
}

// x * scale + mask of elements col to col + n - 1 of a row: x itself where that is all there is, else in v. Without a
// mask they may reach into the rows that follow.
template <class T, class A>
const A* load_scaled(const kfc::Softmax& a, int64_t row, int64_t mask_at, int64_t col, A* v, A* scratch, int64_t n) {
  const A* x = as_accumulator(static_cast<const T*>(a.x) + row * a.cols + col, v, n);
  if (a.scale != 1) {
    const A scale = static_cast<A>(a.scale);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) v[i] = x[i] * scale;
    x = v;
  }
  if (a.mask.data == nullptr) return x;
  if (a.mask.boolean) {
    hide_row(a.mask, mask_at + col * a.mask.inner, x, A(-INFINITY), v, n);
  } else if (a.mask.inner == 1) {
    add_rows(x, as_accumulator(static_cast<const T*>(a.mask.data) + mask_at + col, scratch, n), v, n);
  } else {
    const A added = *as_accumulator(static_cast<const T*>(a.mask.data) + mask_at, scratch, 1);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) v[i] = x[i] + added;
  }
  return v;
}

// out[i] = v[i] / total. A product with the inverse takes a fifth of the time and, of an inverse rounded from double,
// is as accurate in float.
template <class A>
KFC_ROW void divide_row(const A* v, A* out, int64_t n, double total) {
  const A inverse = static_cast<A>(1 / total);
  map_vectors(n, out, [=](auto load) { return sizeof(A) == 8 ? load(v) / static_cast<A>(total) : load(v) * inverse; });
}

// y = v / total; `scratch` holds a block.
template <class T, class A>
void write_quotients(const A* v, double total, T* y, A* scratch, int64_t n) {
  A* out = result_row(y, scratch);
  divide_row(v, out, n, total);
  store_result(out, y, n);
}

// Rows begin to end, which together are at most a block, without a mask: converted and scaled all at once.
template <class T>
void softmax_rows(const kfc::Softmax& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  alignas(64) A v[kBlock];
  alignas(64) A result[kBlock];
  const int64_t n = (end - begin) * a.cols;
  const A* x = load_scaled<T>(a, begin, 0, 0, v, result, n);
  T* y = static_cast<T*>(a.y) + begin * a.cols;
  A* out = result_row(y, result);
  for (int64_t i = 0; i < n; i += a.cols) {
    const double total = exponentials_row(x + i, out + i, a.cols, largest_of(x + i, a.cols, A(-INFINITY)));
    divide_row(static_cast<const A*>(out) + i, out + i, a.cols, total);
  }
  store_result(out, y, n);
}

template <class T>
void softmax_short_row(const kfc::Softmax& a, int64_t row) {
  using A = typename Accumulate<T>::type;
  alignas(64) A row_scratch[kShortRow];
  alignas(64) A scratch[kBlock];
  const A* scaled[kShortRow / kBlock];
  T* y = static_cast<T*>(a.y) + row * a.cols;
  A* v = result_row(y, row_scratch);  // the result's memory is on its way while the exponentials are computed
  const int64_t mask_at = mask_offset(a.mask, row);
  A largest = -INFINITY;
  for (int64_t col = 0; col < a.cols; col += kBlock) {
    const int64_t n = block_length(a, col);
    scaled[col / kBlock] = load_scaled<T>(a, row, mask_at, col, v + col, scratch, n);
    largest = largest_of(scaled[col / kBlock], n, largest);
  }
  double total = 0;
  for (int64_t col = 0; col < a.cols; col += kBlock) {
    total += exponentials_row(scaled[col / kBlock], v + col, block_length(a, col), largest);
  }
  for (int64_t col = 0; col < a.cols; col += kBlock) {
    write_quotients(static_cast<const A*>(v) + col, total, y + col, scratch, block_length(a, col));
  }
}

template <class T>
void softmax_long_row(const kfc::Softmax& a, int64_t row) {
  using A = typename Accumulate<T>::type;
  alignas(64) A v[kBlock];
  alignas(64) A scratch[kBlock];
  const int64_t mask_at = mask_offset(a.mask, row);
  OnlineSum<A> online;
  for (int64_t col = 0; col < a.cols; col += kBlock) {
    const int64_t n = block_length(a, col);
    online.add(load_scaled<T>(a, row, mask_at, col, v, scratch, n), scratch, n);
  }
  T* y = static_cast<T*>(a.y) + row * a.cols;
  for (int64_t col = 0; col < a.cols; col += kBlock) {
    const int64_t n = block_length(a, col);
    exponentials_row(load_scaled<T>(a, row, mask_at, col, v, scratch, n), v, n, online.largest);
    write_quotients(static_cast<const A*>(v), online.total, y + col, scratch, n);
  }
}

// out[i] = scale * y[i] * (grad[i] - total)
template <class A>
KFC_ROW void gradient_of_row(const A* y, const A* grad, A total, A scale, A* out, int64_t n) {
  map_vectors(n, out, [=](auto load) { return scale * load(y) * (load(grad) - total); });
}

template <class T>
void softmax_backward_row(const kfc::Softmax& a, int64_t row) {
  using A = typename Accumulate<T>::type;
  alignas(64) A y_scratch[kBlock];
  alignas(64) A grad_scratch[kBlock];
  alignas(64) A result[kBlock];
  const T* y_row = static_cast<const T*>(a.x) + row * a.cols;
  const T* grad_row = static_cast<const T*>(a.grad) + row * a.cols;
  T* to = static_cast<T*>(a.y) + row * a.cols;
  const int64_t mask_at = mask_offset(a.mask, row);
  double sum = 0;
  for (int64_t col = 0; col < a.cols; col += kBlock) {
    const int64_t n = block_length(a, col);
    const A* y = as_accumulator(y_row + col, y_scratch, n);
    const A* grad = as_accumulator(grad_row + col, grad_scratch, n);
    sum += static_cast<double>(sum_of_products(y, grad, n));
  }
  const A total = static_cast<A>(sum);
  const A scale = static_cast<A>(a.scale);
  for (int64_t col = 0; col < a.cols; col += kBlock) {
    const int64_t n = block_length(a, col);
    const A* y = as_accumulator(y_row + col, y_scratch, n);
    const A* grad = as_accumulator(grad_row + col, grad_scratch, n);
    A* out = result_row(to + col, result);
    if (row + 1 < a.rows) {
      fetch_ahead(y_row + a.cols + col, n);
      fetch_ahead(grad_row + a.cols + col, n);
      fetch_ahead(to + a.cols + col, n);
    }
    gradient_of_row(y, grad, total, scale, out, n);
    // Also where y is NaN.
    if (a.mask.data != nullptr) hide_row(a.mask, mask_at + col * a.mask.inner, out, A(0), out, n);
    store_result(out, to + col, n);
  }
}

// As softmax_rows.
template <class T>
void softmax_backward_rows(const kfc::Softmax& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  alignas(64) A y_scratch[kBlock];
  alignas(64) A grad_scratch[kBlock];
  alignas(64) A result[kBlock];
  const int64_t first = begin * a.cols;
  const int64_t n = (end - begin) * a.cols;
  const A* y = as_accumulator(static_cast<const T*>(a.x) + first, y_scratch, n);
  const A* grad = as_accumulator(static_cast<const T*>(a.grad) + first, grad_scratch, n);
  T* to = static_cast<T*>(a.y) + first;
  A* out = result_row(to, result);
  for (int64_t i = 0; i < n; i += a.cols) {
    const A total = sum_of_products(y + i, grad + i, a.cols);
    gradient_of_row(y + i, grad + i, total, static_cast<A>(a.scale), out + i, a.cols);
  }
  store_result(out, to, n);
}

template <class T>
void softmax_range(const kfc::Softmax& a, int64_t begin, int64_t end) {
  if (a.cols <= kBlock / 2 && a.mask.data == nullptr) {
    const int64_t together = kBlock / a.cols;
    for (int64_t row = begin; row < end; row += together) {
      const int64_t stop = row + together < end ? row + together : end;
      a.grad != nullptr ? softmax_backward_rows<T>(a, row, stop) : softmax_rows<T>(a, row, stop);
    }
    return;
  }
  for (int64_t row = begin; row < end; ++row) {
    if (a.grad != nullptr) {
      softmax_backward_row<T>(a, row);
    } else if (a.cols <= kShortRow) {
      softmax_short_row<T>(a, row);
    } else {
      softmax_long_row<T>(a, row);
    }
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(softmax)(const Softmax& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, softmax_range<T>(a, begin, end));
}

}  // namespace kfc
