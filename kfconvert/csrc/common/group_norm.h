// Host side of group_norm_act, for any backend: y = act(group_norm(x)), and its backward. y is channels last where x
// is, else contiguous; a backend may read contiguous x only, which takes copies.
#pragma once

#include "host.h"

namespace kfc {

// x as rows: the channels of one group of one image each, none where x has no elements. GroupNorm or its backward.
template <class Arguments>
void set_rows(const char* op, const Tensor& x, int64_t groups, Arguments& a) {
  a.dtype = dtype_of(op, options_of(x));
  KFC_CHECK(x.dim() >= 2, op, "x has shape ", shape_text(x), ", expected (N, C, ...)");
  const int64_t channels = x.size(1);
  KFC_CHECK(groups > 0 && channels % groups == 0, op, channels, " channels do not make ", groups, " groups");
  const int64_t numel = x.numel();
  a.groups = groups;
  a.channels = channels / groups;
  a.rows = numel > 0 ? x.size(0) * groups : 0;
  a.inner = numel > 0 ? numel / (a.rows * a.channels) : 0;
}

// weight or bias, contiguous
inline OptionalTensor of_channels(const char* op, const char* name, const OptionalTensor& t, const Tensor& x) {
  if (!t) return std::nullopt;
  check_same_options(op, name, options_of(x), *t);
  KFC_CHECK(t->dim() == 1 && t->size(0) == x.size(1), op, name, " has shape ", shape_text(*t), ", but x has ",
            x.size(1), " channels in dim 1");
  return as_contiguous(*t);
}

// (y, mean, rstd); the last two only where they are asked for
template <class Backend>
std::tuple<Tensor, OptionalTensor, OptionalTensor> group_norm_full(const Tensor& x_in, int64_t groups,
                                                                   const OptionalTensor& weight_in,
                                                                   const OptionalTensor& bias_in, double eps,
                                                                   int64_t activation, double slope,
                                                                   bool want_statistics) {
  const char* op = "group_norm_act";
  GroupNorm a{};
  set_rows(op, x_in, groups, a);
  const OptionalTensor weight = of_channels(op, "weight", weight_in, x_in);
  const OptionalTensor bias = of_channels(op, "bias", bias_in, x_in);
  a.channels_last = is_channels_last(x_in);
  const Tensor x = a.channels_last ? x_in : as_contiguous(x_in);
  const Tensor y = empty_with_layout_of(x);
  a.x = x.const_data_ptr();
  a.y = y.mutable_data_ptr();
  if (a.rows > 0) Backend::plan_group_norm(a, x);
  if (a.channels_last && a.parts == 0) {
    const auto [result, mean, rstd] =
        group_norm_full<Backend>(as_contiguous(x), groups, weight, bias, eps, activation, slope, want_statistics);
    copy_into(y, result);
    return {y, mean, rstd};
  }
  const Options wide = accumulator(options_of(x), a.dtype);
  OptionalTensor mean, rstd, partials;
  if (want_statistics) {
    mean = empty(wide, {x.size(0) * groups});
    rstd = empty(wide, {x.size(0) * groups});
    a.mean = mean->mutable_data_ptr();
    a.rstd = rstd->mutable_data_ptr();
  }
  if (a.parts > 1) {
    partials = empty(wide, {a.rows, a.parts, 2});
    a.partials = partials->mutable_data_ptr();
  }
  a.weight = data_or_null(weight);
  a.bias = data_or_null(bias);
  a.eps = eps;
  a.activation = static_cast<int>(activation);
  a.slope = slope;
  if (a.rows > 0) {
    Backend::group_norm(a, x);
  } else {
    fill_nan(mean);
    fill_nan(rstd);
  }
  return {y, mean, rstd};
}

template <class Backend>
Tensor group_norm_act(const Tensor& x, int64_t groups, const OptionalTensor& weight, const OptionalTensor& bias,
                      double eps, int64_t activation, double slope) {
  return std::get<0>(group_norm_full<Backend>(x, groups, weight, bias, eps, activation, slope, false));
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> group_norm_act_training(const Tensor& x, int64_t groups,
                                                           const OptionalTensor& weight, const OptionalTensor& bias,
                                                           double eps, int64_t activation, double slope) {
  const auto [y, mean, rstd] = group_norm_full<Backend>(x, groups, weight, bias, eps, activation, slope, true);
  return {y, *mean, *rstd};
}

// grad of x, of weight and of bias, in their dtype; the last two are empty where there is no weight or bias.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> group_norm_act_backward(const Tensor& grad_in, const Tensor& x_in,
                                                           const Tensor& mean, const Tensor& rstd,
                                                           const OptionalTensor& weight_in,
                                                           const OptionalTensor& bias_in, int64_t groups,
                                                           int64_t activation, double slope) {
  const char* op = "group_norm_act_backward";
  GroupNormBackward a{};
  set_rows(op, x_in, groups, a);
  const Options options = options_of(x_in);
  const Options wide = accumulator(options, a.dtype);
  check_same_options(op, "grad", options, grad_in);
  check_same_shape(op, "grad", x_in, grad_in);
  for (const Tensor& statistics : {mean, rstd}) {
    const Options own = options_of(statistics);
    check_same_device(op, "mean or rstd", options, own);
    KFC_CHECK(own.dtype == wide.dtype && statistics.is_contiguous() && statistics.numel() == x_in.size(0) * groups, op,
              "mean and rstd must have one element of the accumulation type for each group of each image");
  }
  const OptionalTensor weight = of_channels(op, "weight", weight_in, x_in);
  const OptionalTensor bias = of_channels(op, "bias", bias_in, x_in);
  const Tensor grad = as_contiguous(grad_in);
  const Tensor x = as_contiguous(x_in);
  Tensor grad_x = empty_with_layout_of(x);
  Tensor grad_weight = empty(options, {weight ? x.size(1) : 0});
  Tensor grad_bias = empty(options, {bias ? x.size(1) : 0});
  const Tensor sums = empty(wide, {2, a.rows * a.channels});
  const int64_t bytes_of_one = a.rows * a.channels * (a.dtype == DType::f64 ? 8 : 4);
  a.grad_x = grad_x.mutable_data_ptr();
  a.grad_weight = weight ? grad_weight.mutable_data_ptr() : nullptr;
  a.grad_bias = bias ? grad_bias.mutable_data_ptr() : nullptr;
  a.sums_weight = sums.mutable_data_ptr();
  a.sums_bias = static_cast<char*>(a.sums_weight) + bytes_of_one;
  a.grad = grad.const_data_ptr();
  a.x = x.const_data_ptr();
  a.mean = mean.const_data_ptr();
  a.rstd = rstd.const_data_ptr();
  a.weight = data_or_null(weight);
  a.bias = data_or_null(bias);
  a.activation = static_cast<int>(activation);
  a.slope = slope;
  if (x.size(1) > 0) Backend::group_norm_backward(a, x);
  return {std::move(grad_x), std::move(grad_weight), std::move(grad_bias)};
}

}  // namespace kfc
