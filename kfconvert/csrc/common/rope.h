// Host side of rope, for any backend.
#pragma once

#include "dimensions.h"

namespace kfc {

// t with its columns together: itself, or a contiguous copy.
inline Tensor with_columns_together(const Tensor& t) {
  return t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1 ? t : as_contiguous(t);
}

// Describes where the rows of y, x, cos and sin lie; false where that takes too many dimensions. Rows are taken in the
// order in which they lie in memory: in another they are read and written in pieces, at a third of its bandwidth.
inline bool set_rows(Rope& a, const Tensor& y, const Tensor& x, const Tensor& cos, const Tensor& sin) {
  const std::vector<int64_t> strides[] = {strides_along(x, y), strides_along(x, x), strides_along(x, cos),
                                          strides_along(x, sin)};
  a.dims = 0;
  for (const int64_t i : memory_order(x, x.dim() - 1)) {
    const auto at = static_cast<size_t>(i);
    if (!add_dimension(a.dims, a.sizes, {a.y_strides, a.x_strides, a.cos_strides, a.sin_strides}, x.size(i),
                       {strides[0][at], strides[1][at], strides[2][at], strides[3][at]})) {
      return false;
    }
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
  const bool fits = y.stride(y.dim() - 1) == 1 && set_rows(a, y, x, cos, sin);
  if (!fits) {
    // As rows of contiguous copies.
    x = as_contiguous(x);
    cos = copy_with_layout_of(x, cos);
    sin = copy_with_layout_of(x, sin);
    set_rows(a, x, x, x, x);
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
