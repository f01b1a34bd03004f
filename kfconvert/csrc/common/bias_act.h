// Host side of bias_act, for any backend: y = act(x + bias + residual) and its backward, in x's memory
// layout.
#pragma once

#include "host.h"

namespace kfc {

// The arguments of a dense x, whose channels lie along `dim`. `keep` holds the copies that the pointers need.
inline BiasAct bias_act_arguments(const char* op, const Tensor& x, const OptionalTensor& bias,
                                  const OptionalTensor& residual, int64_t activation, double slope,
                                  int64_t dim, std::vector<Tensor>& keep) {
  const Options options = options_of(x);
  BiasAct a{};
  a.dtype = dtype_of(op, options);
  a.x = x.const_data_ptr();
  a.numel = x.numel();
  a.channels = 1;
  a.inner = 1;
  a.activation = static_cast<int>(activation);
  a.slope = slope;
  if (bias) {
    KFC_CHECK(dim >= -x.dim() && dim < x.dim(), op, "dim ", dim, " is out of range for x of shape ",
              shape_text(x));
    if (dim < 0) dim += x.dim();
    check_same_options(op, "bias", options, *bias);
    KFC_CHECK(bias->dim() == 1 && bias->size(0) == x.size(dim), op, "bias has shape ", shape_text(*bias),
              ", but x has ", x.size(dim), " channels in dim ", dim);
    keep.push_back(as_contiguous(*bias));
    a.bias = keep.back().const_data_ptr();
    a.channels = x.size(dim);
    a.inner = a.channels > 1 ? x.stride(dim) : 1;
  }
  if (residual) {
    check_same_options(op, "residual", options, *residual);
    check_same_shape(op, "residual", x, *residual);
    keep.push_back(with_layout_of(x, *residual));
    a.residual = keep.back().const_data_ptr();
  }
  return a;
}

// x must be dense and is overwritten.
template <class Backend>
void bias_act_in_place(const char* op, const Tensor& x, const OptionalTensor& bias,
                       const OptionalTensor& residual, int64_t activation, double slope, int64_t dim) {
  std::vector<Tensor> keep;
  BiasAct a = bias_act_arguments(op, x, bias, residual, activation, slope, dim, keep);
  a.y = x.mutable_data_ptr();
  if (a.numel > 0) Backend::bias_act(a, x);
}

template <class Backend>
Tensor bias_act(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual,
                int64_t activation, double slope, int64_t dim) {
  if (!is_dense(x)) {
    // The copy that a strided input needs anyway is the output.
    Tensor y = torch::stable::empty_like(x);
    copy_into(y, x);
    bias_act_in_place<Backend>("bias_act", y, bias, residual, activation, slope, dim);
    return y;
  }
  std::vector<Tensor> keep;
  BiasAct a = bias_act_arguments("bias_act", x, bias, residual, activation, slope, dim, keep);
  Tensor y = empty_with_layout_of(x);
  a.y = y.mutable_data_ptr();
  if (a.numel > 0) Backend::bias_act(a, x);
  return y;
}

template <class Backend>
void bias_act_(Tensor x, const OptionalTensor& bias, const OptionalTensor& residual, int64_t activation,
               double slope, int64_t dim) {
  if (is_dense(x)) {
    bias_act_in_place<Backend>("bias_act_", x, bias, residual, activation, slope, dim);
  } else {
    copy_into(x, bias_act<Backend>(x, bias, residual, activation, slope, dim));
  }
}

// grad * act'(x + bias + residual), in grad's layout; for activations that save their output, x is that
// output.
template <class Backend>
Tensor bias_act_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& bias,
                         const OptionalTensor& residual, int64_t activation, double slope, int64_t dim) {
  const char* op = "bias_act_backward";
  check_same_options(op, "grad", options_of(x), grad);
  check_same_shape(op, "grad", x, grad);
  Tensor dense = x;
  if (!is_dense(x)) {
    dense = torch::stable::empty_like(x);
    copy_into(dense, x);
  }
  std::vector<Tensor> keep;
  BiasAct a = bias_act_arguments(op, dense, bias, residual, activation, slope, dim, keep);
  const Tensor grad_here = with_layout_of(dense, grad);
  a.grad = grad_here.const_data_ptr();
  Tensor out = empty_with_layout_of(dense);
  a.y = out.mutable_data_ptr();
  if (a.numel > 0) Backend::bias_act(a, dense);
  return out;
}

}  // namespace kfc
