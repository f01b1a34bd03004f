// Host side of norm_linear, for a backend that has kernels for products of a few rows: an RMS or layer norm, with a
// residual addition before it, and the linear layers that read its result, in one launch.
#pragma once

#include "quantized_linear.h"

namespace kfc {

// The weight or bias of a norm. It cannot be a copy, since the kernel reads it early in a graph.
inline const void* norm_data(const char* op, const char* name, const Options& like, const Tensor& t, int64_t in) {
  check_same_options(op, name, like, t);
  KFC_CHECK(t.dim() == 1 && t.size(0) == in, op, name, " of the norm has another size than x");
  const void* data = t.const_data_ptr();
  KFC_CHECK(t.is_contiguous() && has_words(data, in), op, name, " of the norm is not contiguous and aligned");
  return data;
}

// weights, scales: as for quantized_linear; or one weight of x's dtype, without scales, as for skinny_linear. Returns
// y, and x + residual, which has no elements without a residual.
template <class Backend>
std::tuple<Tensor, Tensor> norm_linear(const Tensor& x_in, const OptionalTensor& residual_in, const Tensor& norm,
                                       const OptionalTensor& norm_bias, double eps, double offset, bool centers,
                                       std::vector<Tensor> weights, std::vector<Tensor> scales,
                                       const OptionalTensor& bias_in, int64_t activation, double slope, bool gated,
                                       bool gate_first) {
  const char* op = "norm_linear";
  const Options options = options_of(x_in);
  KFC_CHECK(x_in.dim() >= 1 && !weights.empty(), op, "expected x with a dimension, and a weight");
  SkinnyProduct a{};
  a.dtype = dtype_of(op, options);
  set_call(a, x_in, x_in.size(x_in.dim() - 1), activation, slope, gated, gate_first);
  OptionalTensor bias;
  if (scales.empty()) {
    const Tensor& weight = weights[0];
    check_linear(op, x_in, weight, bias_in);
    KFC_CHECK(weights.size() == 1 && (!gated || weight.size(0) % 2 == 0), op,
              "expected one weight, with a gate of an even number of rows");
    a.out = weight.size(0) / (gated ? 2 : 1);
    KFC_CHECK(set_weight(a, weight) && !a.transposed, op, "the kernel takes aligned weights with contiguous rows");
    if (bias_in) bias = as_contiguous(*bias_in);
    a.bias = data_or_null(bias);
  } else {
    KFC_CHECK(!bias_in, op, "no bias with quantized weights");
    set_quantized_weights(a, op, x_in, weights, scales, gated);
  }
  KFC_CHECK(has_kernel<Backend>(a, x_in, kSkinnyRows), op, "the kernel takes 1 to ", kSkinnyRows,
            " rows of float16 or bfloat16 elements");
  constexpr int64_t kHalf = 2;  // bytes
  KFC_CHECK((a.rows + (norm_bias ? 2 : 1)) * a.in * kHalf <= kMostHeld, op, "the kernel takes up to ", kMostHeld,
            " bytes of x, and weight and bias of the norm");
  a.norm = norm_data(op, "weight", options, norm, a.in);
  if (norm_bias) a.norm_bias = norm_data(op, "bias", options, *norm_bias, a.in);
  a.centers = centers;
  a.eps = eps;
  a.offset = offset;
  const Tensor x = as_aligned(x_in);
  a.x = x.const_data_ptr();
  a.x_stride = a.in;
  std::vector<int64_t> sizes = sizes_of(x);
  const Tensor sum = empty(options, residual_in ? sizes : std::vector<int64_t>{0});
  OptionalTensor residual;
  if (residual_in) {
    check_same_options(op, "residual", options, *residual_in);
    KFC_CHECK(sizes_of(*residual_in) == sizes, op, "x and residual differ in shape");
    residual = as_aligned(*residual_in);
    a.residual = residual->const_data_ptr();
    a.sum = sum.mutable_data_ptr();
  }
  sizes.back() = a.out;
  const Tensor y = empty(options, sizes);
  a.y = y.mutable_data_ptr();
  Backend::skinny_product(a, x);
  return {y, sum};
}

}  // namespace kfc
