// Host side of layer_norm_act and rms_norm_act, for any backend: s = x + residual; y = act(norm(s)), and its
// backward.
#pragma once

#include "host.h"

namespace kfc {

// weight or bias of the norm: x's dtype, or float32 beside a half type (what CPU autocast leaves behind).
inline OptionalTensor affine(const char* op, const char* name, const OptionalTensor& t, const Options& x, DType dtype,
                             int64_t cols, std::optional<DType>& affine_dtype) {
  if (!t) return std::nullopt;
  const Options options = options_of(*t);
  check_same_device(op, name, x, options);
  KFC_CHECK(t->numel() == cols, op, name, " has ", t->numel(), " elements, normalized_shape has ", cols);
  const DType own = dtype_of(op, options);
  const bool half = dtype == DType::f16 || dtype == DType::bf16;
  KFC_CHECK(own == dtype || (half && own == DType::f32), op, name, " has another dtype than x");
  KFC_CHECK(!affine_dtype || *affine_dtype == own, op, "weight and bias have different dtypes");
  affine_dtype = own;
  return as_contiguous(*t);
}

inline int64_t check_normalized_shape(const char* op, const Tensor& x, const std::vector<int64_t>& shape) {
  const int64_t inner = static_cast<int64_t>(shape.size());
  bool same = inner >= 1 && inner <= x.dim();
  int64_t cols = 1;
  for (int64_t i = 0; same && i < inner; ++i) {
    same = x.size(x.dim() - inner + i) == shape[i];
    cols *= shape[i];
  }
  KFC_CHECK(same, op, "normalized_shape does not fit the last dimensions of x of shape ", shape_text(x));
  return cols;
}

// Which norm; `op` is its operator's name, for messages.
struct NormKind {
  const char* op;
  bool centred;
  double offset;
};

inline NormKind layer_norm_kind() { return {"layer_norm_act", true, 0}; }
inline NormKind rms_norm_kind(double offset) { return {"rms_norm_act", false, offset}; }

inline void check_affine_shape(const char* op, const char* name, const OptionalTensor& t,
                               const std::vector<int64_t>& shape) {
  KFC_CHECK(!t || sizes_of(*t) == shape, op, name, " has shape ", shape_text(*t), ", expected ", shape_text(shape));
}

struct NormOutputs {
  Tensor y;
  OptionalTensor sum;  // what is not asked for is not there; without a residual the sum has no elements
  OptionalTensor mean;
  OptionalTensor rstd;
};

template <class Backend>
NormOutputs norm_full(const NormKind& kind, const Tensor& x_in, const OptionalTensor& residual_in,
                      const std::vector<int64_t>& shape, const OptionalTensor& weight_in, const OptionalTensor& bias_in,
                      double eps, int64_t activation, double slope, bool want_sum, bool want_statistics) {
  const char* op = kind.op;
  const Options options = options_of(x_in);
  LayerNorm a{};
  a.dtype = dtype_of(op, options);
  a.cols = check_normalized_shape(op, x_in, shape);
  a.rows = 1;
  for (int64_t i = 0; i < x_in.dim() - static_cast<int64_t>(shape.size()); ++i) a.rows *= x_in.size(i);
  a.eps = eps;
  a.offset = kind.offset;
  a.centred = kind.centred;
  a.activation = static_cast<int>(activation);
  a.slope = slope;
  check_affine_shape(op, "weight", weight_in, shape);
  check_affine_shape(op, "bias", bias_in, shape);
  std::optional<DType> affine_dtype;
  const OptionalTensor weight = affine(op, "weight", weight_in, options, a.dtype, a.cols, affine_dtype);
  const OptionalTensor bias = affine(op, "bias", bias_in, options, a.dtype, a.cols, affine_dtype);
  a.affine_dtype = affine_dtype.value_or(a.dtype);
  a.weight = data_or_null(weight);
  a.bias = data_or_null(bias);
  const Tensor x = as_contiguous(x_in);
  a.x = x.const_data_ptr();
  OptionalTensor residual;
  if (residual_in) {
    check_same_options(op, "residual", options, *residual_in);
    check_repeats(op, "residual", x, *residual_in, static_cast<int64_t>(shape.size()));
    residual = as_contiguous(*residual_in);
    a.residual_rows = a.cols > 0 ? residual->numel() / a.cols : 0;
    a.residual = residual->const_data_ptr();
  }
  const std::vector<int64_t> full = sizes_of(x);
  NormOutputs out{empty(options, full), std::nullopt, std::nullopt, std::nullopt};
  a.y = out.y.mutable_data_ptr();
  if (want_sum) {
    out.sum = empty(options, residual ? full : std::vector<int64_t>{0});
    if (residual) a.sum = out.sum->mutable_data_ptr();
  }
  if (want_statistics) {
    if (kind.centred) {
      out.mean = empty(accumulator(options, a.dtype), {a.rows});
      a.mean = out.mean->mutable_data_ptr();
    }
    out.rstd = empty(accumulator(options, a.dtype), {a.rows});
    a.rstd = out.rstd->mutable_data_ptr();
  }
  if (a.rows > 0 && a.cols > 0) {
    Backend::layer_norm(a, x);
  } else {
    fill_nan(out.mean);
    fill_nan(out.rstd);
  }
  return out;
}

template <class Backend>
Tensor layer_norm_act(const Tensor& x, const OptionalTensor& residual, const std::vector<int64_t>& shape,
                      const OptionalTensor& weight, const OptionalTensor& bias, double eps, int64_t activation,
                      double slope) {
  return norm_full<Backend>(layer_norm_kind(), x, residual, shape, weight, bias, eps, activation, slope, false, false)
      .y;
}

template <class Backend>
std::tuple<Tensor, Tensor> add_layer_norm_act(const Tensor& x, const Tensor& residual,
                                              const std::vector<int64_t>& shape, const OptionalTensor& weight,
                                              const OptionalTensor& bias, double eps, int64_t activation,
                                              double slope) {
  const NormOutputs out =
      norm_full<Backend>(layer_norm_kind(), x, residual, shape, weight, bias, eps, activation, slope, true, false);
  return {out.y, *out.sum};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor> layer_norm_act_training(const Tensor& x, const OptionalTensor& residual,
                                                                   const std::vector<int64_t>& shape,
                                                                   const OptionalTensor& weight,
                                                                   const OptionalTensor& bias, double eps,
                                                                   int64_t activation, double slope) {
  const NormOutputs out =
      norm_full<Backend>(layer_norm_kind(), x, residual, shape, weight, bias, eps, activation, slope, true, true);
  return {out.y, *out.sum, *out.mean, *out.rstd};
}

template <class Backend>
Tensor rms_norm_act(const Tensor& x, const OptionalTensor& residual, const std::vector<int64_t>& shape,
                    const OptionalTensor& weight, double eps, int64_t activation, double slope, double offset) {
  return norm_full<Backend>(rms_norm_kind(offset), x, residual, shape, weight, std::nullopt, eps, activation, slope,
                            false, false)
      .y;
}

template <class Backend>
std::tuple<Tensor, Tensor> add_rms_norm_act(const Tensor& x, const Tensor& residual, const std::vector<int64_t>& shape,
                                            const OptionalTensor& weight, double eps, int64_t activation, double slope,
                                            double offset) {
  const NormOutputs out = norm_full<Backend>(rms_norm_kind(offset), x, residual, shape, weight, std::nullopt, eps,
                                             activation, slope, true, false);
  return {out.y, *out.sum};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> rms_norm_act_training(const Tensor& x, const OptionalTensor& residual,
                                                         const std::vector<int64_t>& shape,
                                                         const OptionalTensor& weight, double eps, int64_t activation,
                                                         double slope, double offset) {
  const NormOutputs out = norm_full<Backend>(rms_norm_kind(offset), x, residual, shape, weight, std::nullopt, eps,
                                             activation, slope, true, true);
  return {out.y, *out.sum, *out.rstd};
}

// grad of s (which is that of x and of residual), of weight and of bias. The last two are in the dtype of weight and
// bias, and empty where there are none. No mean: an RMS norm.
template <class Backend>
std::tuple<Tensor, Tensor, Tensor> norm_backward(const char* op, const Tensor& grad_in,
                                                 const OptionalTensor& grad_sum_in, const Tensor& s_in,
                                                 const OptionalTensor& mean, const Tensor& rstd,
                                                 const OptionalTensor& weight_in, const OptionalTensor& bias_in,
                                                 int64_t cols, int64_t activation, double slope, double offset) {
  const Options options = options_of(s_in);
  LayerNormBackward a{};
  a.dtype = dtype_of(op, options);
  a.cols = cols;
  a.rows = cols > 0 ? s_in.numel() / cols : rstd.numel();
  a.activation = static_cast<int>(activation);
  a.slope = slope;
  a.offset = offset;
  check_same_options(op, "grad", options, grad_in);
  check_same_shape(op, "grad", s_in, grad_in);
  KFC_CHECK((!mean || mean->numel() == a.rows) && rstd.numel() == a.rows, op,
            "mean and rstd must have one element a row");
  const Tensor grad = as_contiguous(grad_in);
  const Tensor s = as_contiguous(s_in);
  OptionalTensor grad_sum;
  if (grad_sum_in) {
    check_same_options(op, "grad_sum", options, *grad_sum_in);
    check_same_shape(op, "grad_sum", s, *grad_sum_in);
    grad_sum = as_contiguous(*grad_sum_in);
  }
  std::optional<DType> affine_dtype;
  const OptionalTensor weight = affine(op, "weight", weight_in, options, a.dtype, cols, affine_dtype);
  const OptionalTensor bias = affine(op, "bias", bias_in, options, a.dtype, cols, affine_dtype);
  a.affine_dtype = affine_dtype.value_or(a.dtype);
  a.grad = grad.const_data_ptr();
  a.grad_sum = data_or_null(grad_sum);
  a.s = s.const_data_ptr();
  a.mean = data_or_null(mean);
  a.rstd = rstd.const_data_ptr();
  a.weight = data_or_null(weight);
  a.bias = data_or_null(bias);
  Tensor grad_x = empty_with_layout_of(s);
  a.grad_x = grad_x.mutable_data_ptr();
  a.partials = Backend::layer_norm_partials(a, s);
  const Options partial_options = accumulator(options, a.dtype);
  OptionalTensor partial_weight, partial_bias;
  if (weight) {
    partial_weight = empty(partial_options, {a.partials, cols});
    a.partial_weight = partial_weight->mutable_data_ptr();
  }
  if (bias) {
    partial_bias = empty(partial_options, {a.partials, cols});
    a.partial_bias = partial_bias->mutable_data_ptr();
  }
  const Options affine_options = options_of(weight ? *weight : bias ? *bias : s);
  Tensor grad_weight = empty(weight ? affine_options : options, {weight ? cols : 0});
  Tensor grad_bias = empty(bias ? affine_options : options, {bias ? cols : 0});
  Backend::layer_norm_backward(a, weight ? grad_weight.mutable_data_ptr() : nullptr,
                               bias ? grad_bias.mutable_data_ptr() : nullptr, s);
  return {std::move(grad_x), std::move(grad_weight), std::move(grad_bias)};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor> layer_norm_act_backward(const Tensor& grad, const OptionalTensor& grad_sum,
                                                           const Tensor& s, const Tensor& mean, const Tensor& rstd,
                                                           const OptionalTensor& weight, const OptionalTensor& bias,
                                                           int64_t cols, int64_t activation, double slope) {
  return norm_backward<Backend>("layer_norm_act_backward", grad, grad_sum, s, mean, rstd, weight, bias, cols,
                                activation, slope, 0);
}

template <class Backend>
std::tuple<Tensor, Tensor> rms_norm_act_backward(const Tensor& grad, const OptionalTensor& grad_sum, const Tensor& s,
                                                 const Tensor& rstd, const OptionalTensor& weight, int64_t cols,
                                                 int64_t activation, double slope, double offset) {
  auto gradients = norm_backward<Backend>("rms_norm_act_backward", grad, grad_sum, s, std::nullopt, rstd, weight,
                                          std::nullopt, cols, activation, slope, offset);
  return {std::move(std::get<0>(gradients)), std::move(std::get<1>(gradients))};
}

}  // namespace kfc
