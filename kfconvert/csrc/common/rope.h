// Host side of rope, for any backend.
#pragma once

#include <algorithm>
#include <numeric>

#include "host.h"

namespace kfc {

// t with its columns together: itself, or a contiguous copy.
inline Tensor with_columns_together(const Tensor& t) {
  return t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1 ? t : as_contiguous(t);
}

// Sizes that lead t's last one, as of x's, and the strides along them; 0 where t is repeated.
inline std::vector<int64_t> leading_strides(const Tensor& x, const Tensor& t) {
  const int64_t leading = x.dim() - 1;
  const int64_t offset = x.dim() - t.dim();
  std::vector<int64_t> strides(static_cast<size_t>(leading), 0);
  for (int64_t i = offset; i < leading; ++i) {
    if (t.size(i - offset) > 1) strides[static_cast<size_t>(i)] = t.stride(i - offset);
  }
  return strides;
}

// x's leading dimensions as they lie in memory, outermost first: rows that are taken in another order are read and written
// in pieces from all over the memory, at a third of its bandwidth.
inline std::vector<int64_t> memory_order(const Tensor& x) {
  std::vector<int64_t> order(static_cast<size_t>(x.dim() - 1));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x.stride(a) > x.stride(b); });
  return order;
}

// Puts the leading dimensions together where all four tensors allow it; false where too many remain.
inline bool set_rows(Rope& a, const Tensor& x, const std::vector<int64_t> (&strides)[4]) {
  int64_t* targets[4] = {a.y_strides, a.x_strides, a.cos_strides, a.sin_strides};
  a.dims = 0;
  for (const int64_t i : memory_order(x)) {
    if (x.size(i) == 1) continue;
    const auto at = static_cast<size_t>(i);
    bool joined = a.dims > 0;
    for (int k = 0; joined && k < 4; ++k) joined = targets[k][a.dims - 1] == strides[k][at] * x.size(i);
    if (!joined && a.dims == kMostDims) return false;
    const int to = joined ? a.dims - 1 : a.dims++;
    a.sizes[to] = joined ? a.sizes[to] * x.size(i) : x.size(i);
    for (int k = 0; k < 4; ++k) targets[k][to] = strides[k][at];
  }
  if (a.dims == 0) {
    a.dims = 1;
    a.sizes[0] = 1;
  }
  return true;
}

inline void check_angles(const char* op, const char* name, const Tensor& x, const Tensor& t) {
  check_same_options(op, name, options_of(x), t);
  const int64_t offset = x.dim() - t.dim();
  bool fits = t.dim() >= 1 && offset >= 0 && t.size(t.dim() - 1) == x.size(x.dim() - 1);
  for (int64_t i = 0; fits && i < t.dim(); ++i) fits = t.size(i) == 1 || t.size(i) == x.size(offset + i);
  KFC_CHECK(fits, op, name, " has shape ", shape_text(t), ", expected ", shape_text(x),
            " or what broadcasts to it with ", x.size(x.dim() - 1), " columns");
}

template <class Backend>
Tensor rope(const Tensor& x_in, const Tensor& cos_in, const Tensor& sin_in, bool interleaved, bool transposed) {
  const char* op = "rope";
  Rope a{};
  a.dtype = dtype_of(op, options_of(x_in));
  KFC_CHECK(x_in.dim() >= 1 && x_in.size(x_in.dim() - 1) % 2 == 0, op, "x has shape ", shape_text(x_in),
            ", expected an even last dimension");
  check_angles(op, "cos", x_in, cos_in);
  check_angles(op, "sin", x_in, sin_in);
  Tensor x = with_columns_together(x_in);
  Tensor cos = with_columns_together(cos_in);
  Tensor sin = with_columns_together(sin_in);
  Tensor y = torch::stable::empty_like(x);
  if (y.numel() == 0) return y;
  const bool fits = y.stride(y.dim() - 1) == 1 &&
                    set_rows(a, x, {leading_strides(x, y), leading_strides(x, x), leading_strides(x, cos),
                                    leading_strides(x, sin)});
  if (!fits) {
    // As rows of contiguous copies.
    x = as_contiguous(x);
    cos = copy_with_layout_of(x, cos);
    sin = copy_with_layout_of(x, sin);
    const std::vector<int64_t> rows = leading_strides(x, x);
    set_rows(a, x, {rows, rows, rows, rows});
  }
  Tensor result = fits ? y : empty_with_layout_of(x);
  a.x = x.const_data_ptr();
  a.cos = cos.const_data_ptr();
  a.sin = sin.const_data_ptr();
  a.y = result.mutable_data_ptr();
  a.half = x.size(x.dim() - 1) / 2;
  a.rows = x.numel() / (2 * a.half);
  a.interleaved = interleaved;
  a.transposed = transposed;
  Backend::rope(a, x);
  if (fits || y.stride(y.dim() - 1) != 1) return result;
  copy_into(y, result);
  return y;
}

}  // namespace kfc
