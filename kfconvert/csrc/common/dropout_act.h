// Host side of dropout_act, for any backend: y = dropout(act(x + bias)) + residual, and its backward. Results are in
// x's memory layout, in which the elements are counted as well.
#pragma once

#include <cmath>

#include "bias_act.h"

namespace kfc {

// p: the probability to drop an element, less than 1.
inline DropoutAct dropout_act_arguments(const char* op, const BiasAct& terms, const Tensor& x,
                                        const OptionalTensor& state, int64_t seed, int64_t sequence, double p) {
  KFC_CHECK(p >= 0.0 && p < 1.0, op, "p must be at least 0 and less than 1, got ", p);
  DropoutAct a{};
  a.terms = terms;
  if (state) {
    const Options options = options_of(*state);
    check_same_device(op, "state", options_of(x), options);
    KFC_CHECK(options.dtype == aoti_torch_dtype_int64() && state->numel() == 2 && state->is_contiguous(), op,
              "state must be two int64");
    a.state = static_cast<const int64_t*>(state->const_data_ptr());
  }
  a.seed = static_cast<uint64_t>(seed);
  a.sequence = static_cast<uint64_t>(sequence);
  a.dropped = static_cast<uint32_t>(std::fmin(std::round(p * 4294967296.0), 4294967295.0));
  a.scale = 1.0 / (1.0 - p);
  return a;
}

template <class Backend>
Tensor dropout_act(const Tensor& x_in, const OptionalTensor& bias, const OptionalTensor& residual,
                   const OptionalTensor& state, int64_t seed, int64_t sequence, double p, int64_t activation,
                   double slope, int64_t dim) {
  const char* op = "dropout_act";
  const Tensor x = as_dense(x_in);
  std::vector<Tensor> keep;
  const BiasAct terms = bias_act_arguments(op, x, bias, residual, activation, slope, dim, keep);
  DropoutAct a = dropout_act_arguments(op, terms, x, state, seed, sequence, p);
  Tensor y = empty_with_layout_of(x);
  a.terms.y = y.mutable_data_ptr();
  if (y.numel() > 0) Backend::dropout_act(a, x);
  return y;
}

// The gradient of x; that of residual is grad itself.
template <class Backend>
Tensor dropout_act_backward(const Tensor& grad, const Tensor& x_in, const OptionalTensor& bias,
                            const OptionalTensor& state, int64_t seed, int64_t sequence, double p, int64_t activation,
                            double slope, int64_t dim) {
  const char* op = "dropout_act_backward";
  const Tensor x = as_dense(x_in);
  std::vector<Tensor> keep;
  const BiasAct terms = bias_act_arguments(op, x, bias, std::nullopt, activation, slope, dim, keep);
  DropoutAct a = dropout_act_arguments(op, terms, x, state, seed, sequence, p);
  const Tensor grad_here = grad_beside(op, x, grad);
  a.terms.grad = grad_here.const_data_ptr();
  Tensor out = empty_with_layout_of(x);
  a.terms.y = out.mutable_data_ptr();
  if (out.numel() > 0) Backend::dropout_act(a, x);
  return out;
}

}  // namespace kfc
