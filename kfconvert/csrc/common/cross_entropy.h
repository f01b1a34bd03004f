// Host side of cross_entropy, for any backend: the losses of rows of logits, their mean or sum, and the gradient.
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

// The numbers are those of kfconvert/ops/standalone/cross_entropy.py.
enum Reduction : int64_t { kNoReduction = 0, kMean = 1, kSum = 2 };

// (result, lse (rows, 2), weight (1)); see CrossEntropy. Without a reduction the result is the losses, (rows) in the
// accumulation type, and there is no weight.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& x_in, const Tensor& target_in, int64_t ignored,
                                                 double smoothing, int64_t reduction) {
  const Tensor x = as_contiguous(x_in);
  const Tensor target = as_contiguous(target_in);
  CrossEntropy a = cross_entropy_arguments("cross_entropy", x, target, ignored, smoothing);
  Options wide = options_of(x);
  wide.dtype = a.dtype == DType::f64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  Tensor loss = empty(wide, {x.size(0)});
  Tensor lse = empty(wide, {x.size(0), 2});
  a.loss = loss.mutable_data_ptr();
  a.lse = lse.mutable_data_ptr();
  const bool reduced = reduction != kNoReduction;
  Tensor weight = empty(wide, {reduced ? 1 : 0});
  Tensor result = reduced ? empty(options_of(x), {}) : loss;
  if (reduced) {
    a.mean = reduction == kMean;
    a.result = result.mutable_data_ptr();
    a.weight = weight.mutable_data_ptr();
  }
  if (a.rows > 0 || reduced) Backend::cross_entropy(a, x);
  return {std::move(result), std::move(lse), std::move(weight)};
}

// grad: that of the result, in its dtype.
template <class Backend>
Tensor cross_entropy_backward(const Tensor& grad_in, const Tensor& x_in, const Tensor& target_in, const Tensor& lse,
                              const Tensor& weight, int64_t ignored, double smoothing) {
  const char* op = "cross_entropy_backward";
  const Tensor x = as_contiguous(x_in);
  const Tensor target = as_contiguous(target_in);
  CrossEntropy a = cross_entropy_arguments(op, x, target, ignored, smoothing);
  const bool reduced = weight.numel() == 1;
  check_same_options(op, "grad", options_of(reduced ? x : lse), grad_in);
  KFC_CHECK(grad_in.numel() == (reduced ? 1 : a.rows), op, "grad has shape ", shape_text(grad_in));
  const Tensor grad = as_contiguous(grad_in);
  a.grad = grad.const_data_ptr();
  a.grad_stride = reduced ? 0 : 1;
  if (reduced) a.weight = const_cast<void*>(weight.const_data_ptr());
  a.lse = const_cast<void*>(lse.const_data_ptr());
  Tensor grad_x = empty_with_layout_of(x);
  a.grad_x = grad_x.mutable_data_ptr();
  if (x.numel() > 0) Backend::cross_entropy(a, x);
  return grad_x;
}

}  // namespace kfc
