// Host side of the backward passes of bias_act, dropout_act and prelu_bias that give the gradients of bias and slopes
// as well, for any backend. Gradients are in x's memory layout and dtype.
#pragma once

#include "dropout_act.h"

namespace kfc {

// The channels of a dense x along `dim`, also where no bias is given.
inline void check_channels(const char* op, BiasAct& a, const Tensor& x, int64_t dim) {
  KFC_CHECK(dim >= -x.dim() && dim < x.dim(), op, "dim ", dim, " is out of range for x of shape ", shape_text(x));
  set_channels(a, x, dim < 0 ? dim + x.dim() : dim);
}

// Where a backend is to write its sums.
inline ChannelTotals into(DType dtype, const Tensor& first) {
  ChannelTotals sums{};
  sums.totals[0] = first.mutable_data_ptr();
  sums.dtype = dtype;
  return sums;
}

inline ChannelTotals into(DType dtype, const Tensor& first, const Tensor& second) {
  ChannelTotals sums = into(dtype, first);
  sums.totals[1] = second.mutable_data_ptr();
  return sums;
}

inline Tensor empty_total(const Tensor& x, const BiasAct& a) { return empty(options_of(x), {a.channels}); }

// (grad * act'(x + bias + residual), its sum by channel); for activations that save their output, x is that output.
// Without an activation the first is grad, and empty here.
template <class Backend>
std::tuple<Tensor, Tensor> bias_act_gradients(const Tensor& grad_in, const Tensor& x_in, const OptionalTensor& bias,
                                              const OptionalTensor& residual, int64_t activation, double slope,
                                              int64_t dim) {
  const char* op = "bias_act_gradients";
  const Tensor x = as_dense(x_in);
  std::vector<Tensor> keep;
  BiasAct a = bias_act_arguments(op, x, bias, residual, activation, slope, dim, keep);
  check_channels(op, a, x, dim);
  const Tensor grad = grad_beside(op, x, grad_in);
  a.grad = grad.const_data_ptr();
  Tensor of_x = a.activation == 0 ? empty(options_of(x), {0}) : empty_with_layout_of(x);
  a.y = a.activation == 0 ? nullptr : of_x.mutable_data_ptr();
  Tensor of_bias = empty_total(x, a);
  if (a.channels > 0) Backend::bias_act_gradients(a, into(a.dtype, of_bias), x);
  return {std::move(of_x), std::move(of_bias)};
}

// (dropout(grad) * act'(x + bias), its sum by channel)
template <class Backend>
std::tuple<Tensor, Tensor> dropout_act_gradients(const Tensor& grad_in, const Tensor& x_in, const OptionalTensor& bias,
                                                 const OptionalTensor& state, int64_t seed, int64_t sequence, double p,
                                                 int64_t activation, double slope, int64_t dim) {
  const char* op = "dropout_act_gradients";
  const Tensor x = as_dense(x_in);
  std::vector<Tensor> keep;
  BiasAct terms = bias_act_arguments(op, x, bias, std::nullopt, activation, slope, dim, keep);
  check_channels(op, terms, x, dim);
  const Tensor grad = grad_beside(op, x, grad_in);
  terms.grad = grad.const_data_ptr();
  Tensor of_x = empty_with_layout_of(x);
  terms.y = of_x.mutable_data_ptr();
  const DropoutAct a = dropout_act_arguments(op, terms, x, state, seed, sequence, p);
  Tensor of_bias = empty_total(x, terms);
  if (terms.channels > 0) Backend::dropout_act_gradients(a, into(terms.dtype, of_bias), x);
  return {std::move(of_x), std::move(of_bias)};
}

// The gradients of x, bias and slopes.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> prelu_bias_gradients(const Tensor& grad_in, const Tensor& x_in, const Tensor& bias,
                                                        const Tensor& slopes, int64_t dim) {
  const char* op = "prelu_bias_gradients";
  const Tensor x = as_dense(x_in);
  std::vector<Tensor> keep;
  BiasAct a = prelu_arguments(op, x, bias, slopes, dim, keep);
  const Tensor grad = grad_beside(op, x, grad_in);
  a.grad = grad.const_data_ptr();
  Tensor of_x = empty_with_layout_of(x);
  a.y = of_x.mutable_data_ptr();
  Tensor of_bias = empty_total(x, a);
  Tensor of_slopes = empty_total(x, a);
  if (a.channels > 0) Backend::bias_act_gradients(a, into(a.dtype, of_bias, of_slopes), x);
  return {std::move(of_x), std::move(of_bias), std::move(of_slopes)};
}

}  // namespace kfc
