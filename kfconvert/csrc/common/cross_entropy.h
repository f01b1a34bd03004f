// Host side of cross_entropy, for any backend: the loss of each row of logits and its log-sum-exp, and the gradient.
#pragma once

#include <tuple>

#include "host.h"

namespace kfc {

inline CrossEntropy cross_entropy_arguments(const char* op, const Tensor& x, const Tensor& target, int64_t ignored,
                                            double smoothing) {
  const Options options = options_of(x);
  const Options of_target = options_of(target);
  CrossEntropy a{};
  a.dtype = dtype_of(op, options);
  KFC_CHECK(x.dim() == 2, op, "x has shape ", shape_text(x), ", expected (rows, classes)");
  check_same_device(op, "target", options, of_target);
  KFC_CHECK(of_target.dtype == aoti_torch_dtype_int64(), op, "target must be int64");
  KFC_CHECK(target.dim() == 1 && target.size(0) == x.size(0), op, "target has shape ", shape_text(target),
            ", expected (", x.size(0), ",)");
  a.rows = x.size(0);
  a.cols = x.size(1);
  a.x = x.const_data_ptr();
  a.target = static_cast<const int64_t*>(target.const_data_ptr());
  a.ignored = ignored;
  a.smoothing = smoothing;
  return a;
}

// (loss (rows), lse (rows, 2)) in the accumulation type; see CrossEntropy.
template <class Backend>
std::tuple<Tensor, Tensor> cross_entropy(const Tensor& x_in, const Tensor& target_in, int64_t ignored,
                                         double smoothing) {
  const Tensor x = as_contiguous(x_in);
  const Tensor target = as_contiguous(target_in);
  CrossEntropy a = cross_entropy_arguments("cross_entropy", x, target, ignored, smoothing);
  Options wide = options_of(x);
  wide.dtype = a.dtype == DType::f64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  Tensor loss = empty(wide, {x.size(0)});
  Tensor lse = empty(wide, {x.size(0), 2});
  a.loss = loss.mutable_data_ptr();
  a.lse = lse.mutable_data_ptr();
  if (a.rows > 0) Backend::cross_entropy(a, x);
  return {std::move(loss), std::move(lse)};
}

// grad: (rows) or one element, that of the losses.
template <class Backend>
Tensor cross_entropy_backward(const Tensor& grad_in, const Tensor& x_in, const Tensor& target_in, const Tensor& lse,
                              int64_t ignored, double smoothing) {
  const char* op = "cross_entropy_backward";
  const Tensor x = as_contiguous(x_in);
  const Tensor target = as_contiguous(target_in);
  CrossEntropy a = cross_entropy_arguments(op, x, target, ignored, smoothing);
  check_same_options(op, "grad", options_of(lse), grad_in);
  KFC_CHECK(grad_in.numel() == a.rows || grad_in.numel() == 1, op, "grad has shape ", shape_text(grad_in));
  const Tensor grad = as_contiguous(grad_in);
  a.grad = grad.const_data_ptr();
  a.grad_stride = grad.numel() == 1 ? 0 : 1;
  a.lse = const_cast<void*>(lse.const_data_ptr());
  Tensor grad_x = empty_with_layout_of(x);
  a.grad_x = grad_x.mutable_data_ptr();
  if (x.numel() > 0) Backend::cross_entropy(a, x);
  return grad_x;
}

}  // namespace kfc
