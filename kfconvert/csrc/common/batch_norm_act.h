// Host side of batch_norm_act, for any backend: y = act(batch_norm(x)) with given statistics, and its backward. Results
// are in x's memory layout.
#pragma once

#include "channel_gradients.h"

namespace kfc {

// Of a dense x; `keep` holds the copies that the pointers need.
inline BatchNormAct batch_norm_arguments(const char* op, const Tensor& x, const Tensor& mean, const Tensor& variance,
                                         const OptionalTensor& weight, const OptionalTensor& bias, double eps,
                                         int64_t activation, double slope, std::vector<Tensor>& keep) {
  KFC_CHECK(x.dim() >= 2, op, "x has shape ", shape_text(x), ", expected (N, C, ...)");
  BatchNormAct a{};
  a.terms = bias_act_arguments(op, x, std::nullopt, std::nullopt, activation, slope, 1, keep);
  set_channels(a.terms, x, 1);
  a.eps = eps;
  check_given(op, "mean", mean);
  const Options own = options_of(x);
  const Options options = options_of(mean);
  a.dtype = dtype_of(op, options);
  const bool half = a.terms.dtype == DType::f16 || a.terms.dtype == DType::bf16;
  KFC_CHECK(a.dtype == a.terms.dtype || (half && a.dtype == DType::f32), op, "mean has another dtype than x");
  const auto data = [&](const char* name, const Tensor& t) -> const void* {
    check_given(op, name, t);
    check_same_device(op, name, own, options_of(t));
    KFC_CHECK(options_of(t).dtype == options.dtype, op, name, " has another dtype than mean");
    KFC_CHECK(t.dim() == 1 && t.size(0) == x.size(1), op, name, " has shape ", shape_text(t), ", but x has ", x.size(1),
              " channels in dim 1");
    keep.push_back(as_contiguous(t));
    return keep.back().const_data_ptr();
  };
  a.mean = data("mean", mean);
  a.variance = data("variance", variance);
  if (weight) a.weight = data("weight", *weight);
  if (bias) a.bias = data("bias", *bias);
  return a;
}

template <class Backend>
Tensor batch_norm_act(const Tensor& x_in, const Tensor& mean, const Tensor& variance, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps, int64_t activation, double slope) {
  const Tensor x = as_dense(x_in);
  std::vector<Tensor> keep;
  BatchNormAct a =
      batch_norm_arguments("batch_norm_act", x, mean, variance, weight, bias, eps, activation, slope, keep);
  Tensor y = empty_with_layout_of(x);
  a.terms.y = y.mutable_data_ptr();
  if (a.terms.numel > 0) Backend::batch_norm_act(a, x);
  return y;
}

// The gradients of x, weight and bias; the last two in the dtype of mean, whether there are weight and bias or not.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> batch_norm_act_gradients(const Tensor& grad_in, const Tensor& x_in,
                                                            const Tensor& mean, const Tensor& variance,
                                                            const OptionalTensor& weight, const OptionalTensor& bias,
                                                            double eps, int64_t activation, double slope) {
  const char* op = "batch_norm_act_gradients";
  const Tensor x = as_dense(x_in);
  std::vector<Tensor> keep;
  BatchNormAct a = batch_norm_arguments(op, x, mean, variance, weight, bias, eps, activation, slope, keep);
  const Tensor grad = grad_beside(op, x, grad_in);
  a.terms.grad = grad.const_data_ptr();
  Tensor of_x = empty_with_layout_of(x);
  a.terms.y = of_x.mutable_data_ptr();
  Tensor of_weight = empty(options_of(mean), {a.terms.channels});
  Tensor of_bias = empty(options_of(mean), {a.terms.channels});
  if (a.terms.channels > 0) Backend::batch_norm_act_gradients(a, into(a.dtype, of_weight, of_bias), x);
  return {std::move(of_x), std::move(of_weight), std::move(of_bias)};
}

}  // namespace kfc
