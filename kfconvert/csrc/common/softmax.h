// Host side of softmax, for any backend: y = softmax(x * scale + mask) over the last dimension, and its backward.
#pragma once

#include "dimensions.h"

namespace kfc {

// Describes how `mask` repeats over x's leading dimensions, neighbours put together where that is possible; false where
// too many remain.
inline bool set_mask(RowMask& m, const Tensor& x, const Tensor& mask) {
  const std::vector<int64_t> strides = strides_along(x, mask);
  m.data = mask.const_data_ptr();
  m.inner = strides.back();
  m.dims = 0;
  for (size_t i = 0; i + 1 < strides.size(); ++i) {
    if (!add_dimension(m.dims, m.sizes, {m.strides}, x.size(static_cast<int64_t>(i)), {strides[i]})) return false;
  }
  return true;
}

// `keep` holds the copy that the pointer needs.
inline RowMask row_mask(const char* op, const Tensor& x, const OptionalTensor& given, OptionalTensor& keep) {
  RowMask m{};
  if (!given) return m;
  const Options options = options_of(*given);
  const Options own = options_of(x);
  check_same_device(op, "mask", own, options);
  m.boolean = options.dtype == aoti_torch_dtype_bool();
  KFC_CHECK(m.boolean || options.dtype == own.dtype, op, "mask must be boolean or have the dtype of x");
  bool fits = given->dim() <= x.dim();
  for (int64_t i = 1; fits && i <= given->dim(); ++i) {
    const int64_t size = given->size(given->dim() - i);
    fits = size == 1 || size == x.size(x.dim() - i);
  }
  KFC_CHECK(fits, op, "mask of shape ", shape_text(*given), " does not broadcast to ", shape_text(x));
  const bool in_rows = given->dim() == 0 || given->size(given->dim() - 1) == 1 || given->stride(given->dim() - 1) == 1;
  keep = in_rows ? *given : as_contiguous(*given);
  if (!set_mask(m, x, *keep)) {
    const auto sizes = x.sizes();
    Tensor full = empty(options, std::vector<int64_t>(sizes.begin(), sizes.end()));
    copy_into(full, *given);
    keep = full;
    set_mask(m, x, full);
  }
  return m;
}

inline Softmax softmax_arguments(const char* op, const Tensor& x, double scale) {
  KFC_CHECK(x.dim() >= 1, op, "x has no dimension");
  Softmax a{};
  a.dtype = dtype_of(op, options_of(x));
  a.cols = x.size(x.dim() - 1);
  a.rows = a.cols > 0 ? x.numel() / a.cols : 0;
  a.scale = scale;
  a.x = x.const_data_ptr();
  return a;
}

template <class Backend>
Tensor softmax(const Tensor& x_in, const OptionalTensor& mask, double scale) {
  const char* op = "softmax";
  const Tensor x = as_contiguous(x_in);
  Softmax a = softmax_arguments(op, x, scale);
  OptionalTensor keep;
  a.mask = row_mask(op, x, mask, keep);
  Tensor y = empty_with_layout_of(x);
  a.y = y.mutable_data_ptr();
  if (x.numel() > 0) Backend::softmax(a, x);
  return y;
}

// y: what softmax has returned for x with `mask`, which is boolean: an additive one has no part in the gradient of x.
template <class Backend>
Tensor softmax_backward(const Tensor& grad_in, const Tensor& y_in, const OptionalTensor& mask, double scale) {
  const char* op = "softmax_backward";
  check_same_options(op, "grad", options_of(y_in), grad_in);
  check_same_shape(op, "grad", y_in, grad_in);
  const Tensor y = as_contiguous(y_in);
  const Tensor grad = as_contiguous(grad_in);
  Softmax a = softmax_arguments(op, y, scale);
  a.grad = grad.const_data_ptr();
  OptionalTensor keep;
  a.mask = row_mask(op, y, mask, keep);
  KFC_CHECK(!mask || a.mask.boolean, op, "mask must be boolean");
  Tensor grad_x = empty_with_layout_of(y);
  a.y = grad_x.mutable_data_ptr();
  if (y.numel() > 0) Backend::softmax(a, y);
  return grad_x;
}

}  // namespace kfc
