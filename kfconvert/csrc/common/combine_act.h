// Host side of combine_act, for any backend: act(x + other), act(x * other) or act(x) * other, broadcast, and the
// gradients of the last two.
#pragma once

#include <algorithm>

#include "dimensions.h"

namespace kfc {

inline std::vector<int64_t> broadcast_sizes(const char* op, const Tensor& x, const Tensor& other) {
  const int64_t dim = x.dim() > other.dim() ? x.dim() : other.dim();
  std::vector<int64_t> sizes(static_cast<size_t>(dim));
  for (int64_t i = 1; i <= dim; ++i) {
    const int64_t a = i <= x.dim() ? x.size(x.dim() - i) : 1;
    const int64_t b = i <= other.dim() ? other.size(other.dim() - i) : 1;
    KFC_CHECK(a == b || a == 1 || b == 1, op, "shapes ", shape_text(x), " and ", shape_text(other),
              " do not broadcast");
    sizes[static_cast<size_t>(dim - i)] = a == 1 ? b : a;
  }
  return sizes;
}

inline bool has_sizes(const Tensor& t, const std::vector<int64_t>& sizes) {
  const auto own = t.sizes();
  return own.size() == sizes.size() && std::equal(own.begin(), own.end(), sizes.begin());
}

// In the layout of the first operand that is not repeated.
inline Tensor empty_result(const Tensor& x, const Tensor& other, const std::vector<int64_t>& sizes) {
  if (has_sizes(x, sizes)) return torch::stable::empty_like(x);
  if (has_sizes(other, sizes)) return torch::stable::empty_like(other);
  return empty(options_of(x), sizes);
}

// Describes the operands along y, whose dimensions are taken in the order in which they lie in memory and put
// together where both operands allow it; false where too many remain.
inline bool set_operands(CombineAct& a, const Tensor& y, const Tensor& x, const Tensor& other) {
  a.x.data = x.const_data_ptr();
  a.other.data = other.const_data_ptr();
  a.numel = y.numel();
  const std::vector<int64_t> strides[2] = {strides_along(y, x), strides_along(y, other)};
  a.dims = 0;
  for (const int64_t i : memory_order(y, y.dim())) {
    const auto at = static_cast<size_t>(i);
    if (!add_dimension(a.dims, a.sizes, {a.x.strides, a.other.strides}, y.size(i), {strides[0][at], strides[1][at]})) {
      return false;
    }
  }
  if (a.dims == 0) {
    a.dims = 1;
    a.sizes[0] = 1;
    a.x.strides[0] = a.other.strides[0] = 1;
  }
  return true;
}

// `keep` holds the copies that the pointers need.
inline CombineAct combine_act_arguments(const char* op, const Tensor& y, const Tensor& x, const Tensor& other,
                                        int64_t combination, int64_t activation, double slope,
                                        std::vector<Tensor>& keep) {
  CombineAct a{};
  a.dtype = dtype_of(op, options_of(x));
  a.combination = static_cast<Combination>(combination);
  a.activation = static_cast<int>(activation);
  a.slope = slope;
  if (!set_operands(a, y, x, other)) {
    keep = {copy_with_layout_of(y, x), copy_with_layout_of(y, other)};
    set_operands(a, y, keep[0], keep[1]);
  }
  return a;
}

template <class Backend>
Tensor combine_act(const Tensor& x, const Tensor& other, int64_t combination, int64_t activation, double slope) {
  const char* op = "combine_act";
  check_same_options(op, "other", options_of(x), other);
  const Tensor y = empty_result(x, other, broadcast_sizes(op, x, other));
  std::vector<Tensor> keep;
  CombineAct a = combine_act_arguments(op, y, x, other, combination, activation, slope, keep);
  a.y = y.mutable_data_ptr();
  if (a.numel > 0) Backend::combine_act(a, x);
  return y;
}

// The gradients of act(x * other) or act(x) * other with respect to x and to other, both in the sizes and layout of
// the result.
template <class Backend>
std::tuple<Tensor, Tensor> combine_act_backward(const Tensor& grad, const Tensor& x, const Tensor& other,
                                                int64_t combination, int64_t activation, double slope) {
  const char* op = "combine_act_backward";
  check_same_options(op, "other", options_of(x), other);
  check_same_options(op, "grad", options_of(x), grad);
  const std::vector<int64_t> sizes = broadcast_sizes(op, x, other);
  Tensor grad_x = empty_result(x, other, sizes);
  Tensor grad_other = empty_with_layout_of(grad_x);
  check_same_shape(op, "grad", grad_x, grad);
  std::vector<Tensor> keep;
  CombineAct a = combine_act_arguments(op, grad_x, x, other, combination, activation, slope, keep);
  const Tensor dense = with_layout_of(grad_x, grad);
  a.grad = dense.const_data_ptr();
  a.y = grad_x.mutable_data_ptr();
  a.grad_other = grad_other.mutable_data_ptr();
  if (a.numel > 0) Backend::combine_act(a, x);
  return {std::move(grad_x), std::move(grad_other)};
}

}  // namespace kfc
