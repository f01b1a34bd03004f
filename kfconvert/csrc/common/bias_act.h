// Host side of bias_act, for any backend: y = act(x + bias + residual) and its backward, of scale_shift_act:
// y = act(x * scale + shift), and of prelu_bias: y = prelu(x + bias). Results are in x's memory layout.
#pragma once

#include "host.h"

namespace kfc {

// x, or a dense copy of it.
inline Tensor as_dense(const Tensor& x) {
  if (is_dense(x)) return x;
  Tensor copy = torch::stable::empty_like(x);
  copy_into(copy, x);
  return copy;
}

inline void set_channels(BiasAct& a, const Tensor& x, int64_t dim) {
  a.channels = x.size(dim);
  a.inner = a.channels > 1 ? x.stride(dim) : 1;
}

// The arguments of a dense x, whose channels lie along `dim`. `keep` holds the copies that the pointers need.
inline BiasAct bias_act_arguments(const char* op, const Tensor& x, const OptionalTensor& bias,
                                  const OptionalTensor& residual, int64_t activation, double slope, int64_t dim,
                                  std::vector<Tensor>& keep) {
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
    KFC_CHECK(dim >= -x.dim() && dim < x.dim(), op, "dim ", dim, " is out of range for x of shape ", shape_text(x));
    if (dim < 0) dim += x.dim();
    check_same_options(op, "bias", options, *bias);
    KFC_CHECK(bias->dim() == 1 && bias->size(0) == x.size(dim), op, "bias has shape ", shape_text(*bias),
              ", but x has ", x.size(dim), " channels in dim ", dim);
    keep.push_back(as_contiguous(*bias));
    a.bias = keep.back().const_data_ptr();
    set_channels(a, x, dim);
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
void bias_act_in_place(const char* op, const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual,
                       int64_t activation, double slope, int64_t dim) {
  std::vector<Tensor> keep;
  BiasAct a = bias_act_arguments(op, x, bias, residual, activation, slope, dim, keep);
  a.y = x.mutable_data_ptr();
  if (a.numel > 0) Backend::bias_act(a, x);
}

template <class Backend>
Tensor bias_act(const Tensor& x, const OptionalTensor& bias, const OptionalTensor& residual, int64_t activation,
                double slope, int64_t dim) {
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
void bias_act_(Tensor x, const OptionalTensor& bias, const OptionalTensor& residual, int64_t activation, double slope,
               int64_t dim) {
  if (is_dense(x)) {
    bias_act_in_place<Backend>("bias_act_", x, bias, residual, activation, slope, dim);
  } else {
    copy_into(x, bias_act<Backend>(x, bias, residual, activation, slope, dim));
  }
}

// grad, which is given in any layout, in that of a dense x.
inline Tensor grad_beside(const char* op, const Tensor& x, const Tensor& grad) {
  check_same_options(op, "grad", options_of(x), grad);
  check_same_shape(op, "grad", x, grad);
  return with_layout_of(x, grad);
}

// grad * act'(x + bias + residual), in grad's layout; for activations that save their output, x is that
// output.
template <class Backend>
Tensor bias_act_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& bias,
                         const OptionalTensor& residual, int64_t activation, double slope, int64_t dim) {
  const char* op = "bias_act_backward";
  const Tensor dense = as_dense(x);
  std::vector<Tensor> keep;
  BiasAct a = bias_act_arguments(op, dense, bias, residual, activation, slope, dim, keep);
  const Tensor grad_here = grad_beside(op, dense, grad);
  a.grad = grad_here.const_data_ptr();
  Tensor out = empty_with_layout_of(dense);
  a.y = out.mutable_data_ptr();
  if (a.numel > 0) Backend::bias_act(a, dense);
  return out;
}

// The arguments of prelu for a dense x; bias and slopes lie along `dim`.
inline BiasAct prelu_arguments(const char* op, const Tensor& x, const Tensor& bias, const Tensor& slopes, int64_t dim,
                               std::vector<Tensor>& keep) {
  BiasAct a = bias_act_arguments(op, x, bias, std::nullopt, 0, 0.0, dim, keep);
  check_same_options(op, "weight", options_of(x), slopes);
  check_same_shape(op, "weight", bias, slopes);
  keep.push_back(as_contiguous(slopes));
  a.slopes = keep.back().const_data_ptr();
  return a;
}

// v = x + bias; v where it is positive, else v * slopes.
template <class Backend>
Tensor prelu_bias(const Tensor& x_in, const Tensor& bias, const Tensor& slopes, int64_t dim) {
  const char* op = "prelu_bias";
  const Tensor x = as_dense(x_in);
  std::vector<Tensor> keep;
  BiasAct a = prelu_arguments(op, x, bias, slopes, dim, keep);
  Tensor y = empty_with_layout_of(x);
  a.y = y.mutable_data_ptr();
  if (a.numel > 0) Backend::bias_act(a, x);
  return y;
}

// act(x * scale + shift) along dimension 1. scale and shift: in the accumulation type of x.
template <class Backend>
Tensor scale_shift_act(const Tensor& x_in, const Tensor& scale, const Tensor& shift, int64_t activation, double slope) {
  const char* op = "scale_shift_act";
  const Tensor x = as_dense(x_in);
  const Options options = options_of(x);
  KFC_CHECK(x.dim() >= 2, op, "x has shape ", shape_text(x), ", expected (N, C, ...)");
  const bool is_double = dtype_of(op, options) == DType::f64;
  const int32_t wide = is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32();
  const auto check = [&](const char* name, const Tensor& t) {
    check_given(op, name, t);
    const Options other = options_of(t);
    check_same_device(op, name, options, other);
    KFC_CHECK(other.dtype == wide, op, name, " must be ", is_double ? "float64" : "float32");
    KFC_CHECK(t.dim() == 1 && t.size(0) == x.size(1), op, name, " has shape ", shape_text(t), ", but x has ", x.size(1),
              " channels in dim 1");
  };
  check("scale", scale);
  check("shift", shift);
  std::vector<Tensor> keep;
  BiasAct a = bias_act_arguments(op, x, std::nullopt, std::nullopt, activation, slope, 1, keep);
  const Tensor scale_here = as_contiguous(scale);
  const Tensor shift_here = as_contiguous(shift);
  a.scale = scale_here.const_data_ptr();
  a.bias = shift_here.const_data_ptr();
  set_channels(a, x, 1);
  const Tensor y = empty_with_layout_of(x);
  a.y = y.mutable_data_ptr();
  if (a.numel > 0) Backend::bias_act(a, x);
  return y;
}

}  // namespace kfc
