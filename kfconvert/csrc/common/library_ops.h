// linear_act and conv_act: the library's product or convolution, then one in-place epilogue.
//   y = act(x W^T + b)          y = act(conv(x, W) + b + residual)
#pragma once

#include "../common/activation.h"
#include "bias_act.h"
#include "depthwise.h"

namespace kfc {

inline void check_linear(const char* op, const Tensor& x, const Tensor& weight, const OptionalTensor& bias) {
  const Options options = options_of(x);
  dtype_of(op, options);
  check_same_options(op, "weight", options, weight);
  KFC_CHECK(weight.dim() == 2 && x.dim() >= 1 && x.size(x.dim() - 1) == weight.size(1), op, "x of shape ",
            shape_text(x), " does not fit weight of shape ", shape_text(weight), " (out, in)");
  if (bias) {
    check_same_options(op, "bias", options, *bias);
    KFC_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, "bias has shape ", shape_text(*bias),
              ", expected (", weight.size(0), ",)");
  }
}

template <class Backend>
Tensor linear_act(const Tensor& x_in, const Tensor& weight, const OptionalTensor& bias, int64_t activation,
                  double slope) {
  const char* op = "linear_act";
  const Options options = options_of(x_in);
  check_linear(op, x_in, weight, bias);
  const int64_t in = weight.size(1);
  const int64_t out = weight.size(0);
  const Backend guard(x_in);
  const Tensor x = x_in.dim() == 2 ? x_in : as_contiguous(x_in);
  const auto x_sizes = x.sizes();
  std::vector<int64_t> sizes(x_sizes.begin(), x_sizes.end());
  sizes.back() = out;
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  const bool flat = x.dim() == 2;
  const Tensor x_matrix = flat ? x : view(x, {rows, in}, {in, 1});
  const Tensor weight_t = view(weight, {in, out}, {weight.stride(1), weight.stride(0)});
  if (rows > 0 && out > 0 && activation == kRelu && bias) {
    if (OptionalTensor y = Backend::linear_relu(x_matrix, weight_t, *bias)) {
      return flat ? *y : view(*y, sizes, contiguous_strides(sizes));
    }
  }
  const Tensor y = empty(options, sizes);
  if (y.numel() == 0) return y;
  const Tensor y_matrix = flat ? y : view(y, {rows, out}, {out, 1});
  Backend::linear(y_matrix, x_matrix, weight_t, bias);
  if (activation != kNone) bias_act_in_place<Backend>(op, y, std::nullopt, std::nullopt, activation, slope, -1);
  return y;
}

// What the library would refuse in many lines. x and weight fit each other, and the lists have a number a dimension.
inline void check_geometry(const char* op, const Tensor& x, const Tensor& weight, const Convolution& c) {
  const int64_t out = weight.size(0);
  KFC_CHECK(out >= c.groups && out % c.groups == 0, op, "weight has ", out, " output channels, which ", c.groups,
            " groups do not divide");
  // ATen takes an empty batch or no channels, but no empty image.
  const bool nothing = x.size(0) == 0 || x.size(1) == 0;
  double numel = static_cast<double>(x.size(0)) * static_cast<double>(out);  // in double, which does not overflow
  for (size_t i = 0; i < c.stride.size(); ++i) {
    KFC_CHECK(c.stride[i] > 0 && c.dilation[i] > 0 && c.padding[i] >= 0, op, "stride ", shape_text(c.stride),
              " and dilation ", shape_text(c.dilation), " must be positive, padding ", shape_text(c.padding),
              " not negative");
    const int64_t dim = static_cast<int64_t>(i) + 2;
    const double padded = static_cast<double>(x.size(dim)) + 2 * static_cast<double>(c.padding[i]);
    const double spanned = static_cast<double>(c.dilation[i]) * static_cast<double>(weight.size(dim) - 1) + 1;
    KFC_CHECK(weight.size(dim) > 0 && spanned <= padded && (x.size(dim) > 0 || nothing), op, "x of shape ",
              shape_text(x), " with padding ", shape_text(c.padding), " is smaller than weight of shape ",
              shape_text(weight), " with dilation ", shape_text(c.dilation));
    numel *= (padded - spanned) / static_cast<double>(c.stride[i]) + 1;
  }
  KFC_CHECK(numel < 1e18, op, "padding ", shape_text(c.padding), " makes too large an output");
}

template <class Backend>
Tensor conv_act(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const OptionalTensor& residual,
                std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation,
                int64_t groups, int64_t activation, double slope) {
  const char* op = "conv_act";
  const Options options = options_of(x);
  dtype_of(op, options);
  check_same_options(op, "weight", options, weight);
  const int64_t spatial = weight.dim() - 2;
  KFC_CHECK(spatial >= 1 && spatial <= 3 && x.dim() == weight.dim(), op, "x of shape ", shape_text(x),
            " does not fit weight of shape ", shape_text(weight), " (out, in / groups, kernel...)");
  KFC_CHECK(groups > 0 && x.size(1) == weight.size(1) * groups, op, "x has ", x.size(1), " channels, expected ",
            weight.size(1) * groups);
  if (bias) {
    check_same_options(op, "bias", options, *bias);
    KFC_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), op, "bias has shape ", shape_text(*bias),
              ", expected (", weight.size(0), ",)");
  }
  for (std::vector<int64_t>* list : {&stride, &padding, &dilation}) {
    if (list->size() == 1) list->resize(spatial, list->front());
    KFC_CHECK(static_cast<int64_t>(list->size()) == spatial, op, "stride, padding and dilation need 1 or ", spatial,
              " numbers");
  }
  if (residual) check_same_options(op, "residual", options, *residual);
  const Convolution convolution{std::move(stride), std::move(padding), std::move(dilation), groups};
  check_geometry(op, x, weight, convolution);
  const Backend guard(x);
  if constexpr (Backend::has_depthwise) {
    DepthwiseConvolution a{};
    if (!residual && set_depthwise(a, x, weight, bias, convolution) && Backend::has_tensor_cores(x)) {
      a.activation = static_cast<int>(activation);
      a.slope = slope;
      const Tensor y = empty_channels_last(options, {a.images, a.channels, a.out_height, a.out_width});
      a.y = y.mutable_data_ptr();
      Backend::depthwise(a, x);
      return y;
    }
  }
  if (activation == kRelu && bias && x.numel() > 0) {
    if (OptionalTensor y = Backend::conv_relu(x, weight, *bias, residual, convolution)) return *y;
  }
  // What the library does not fuse itself is left to the epilogue, which reads and writes the output once. Where there
  // is an epilogue, the bias is left to it too: oneDNN's convolution for AVX2 starts its sums with the bias, and rounds
  // every partial sum to the places of a large one (folded batch norms have such): 2 to 3 times the error.
  const bool fused_bias = Backend::library_fuses_conv_bias && activation == kNone && !residual;
  const OptionalTensor inner_bias = fused_bias ? bias : std::nullopt;
  const OptionalTensor outer_bias = fused_bias ? std::nullopt : bias;
  const Tensor y = Backend::convolution(x, weight, inner_bias, convolution);
  if (activation != kNone || outer_bias || residual) {
    bias_act_<Backend>(y, outer_bias, residual, activation, slope, 1);
  }
  return y;
}

}  // namespace kfc
