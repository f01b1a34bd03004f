// Host side of quantized_linear, for a backend that has kernels for products of a few rows: (x W^T) * scale with
// weights of int8 or float8 numbers, side by side, or act(g) * u of two such products g, u. More rows take several
// launches.
#pragma once

#include <limits>

#include "skinny_linear.h"

namespace kfc {

// The most launches for one product, of up to kSkinnyRows rows each.
constexpr int64_t kMostLaunches = 4;

// Checks a weight and its scale, and returns the scale, contiguous. The weight cannot be a copy, since the kernel reads
// it early in a graph.
inline Tensor checked_scale(const char* op, const Tensor& x, const Tensor& weight, const Tensor& scale, int32_t numbers,
                            int32_t scales) {
  const Options options = options_of(x);
  check_same_device(op, "weight", options, options_of(weight));
  check_same_device(op, "scale", options, options_of(scale));
  KFC_CHECK(options_of(weight).dtype == numbers && options_of(scale).dtype == scales, op,
            "the weights or the scales differ in dtype");
  KFC_CHECK(
      weight.dim() == 2 && x.dim() >= 1 && x.size(x.dim() - 1) == weight.size(1) && scale.numel() == weight.size(0), op,
      "x, weight and scale of shapes ", shape_text(x), ", ", shape_text(weight), " and ", shape_text(scale),
      " do not fit");
  KFC_CHECK(weight.is_contiguous() && has_words(weight.const_data_ptr(), weight.size(1), 1), op,
            "the kernel takes contiguous, aligned weights with rows of a multiple of 16 elements");
  return as_contiguous(scale);
}

// Sets the weights and their scales. Makes `scales` contiguous, which must outlive the launch.
inline void set_quantized_weights(SkinnyProduct& a, const char* op, const Tensor& x, const std::vector<Tensor>& weights,
                                  std::vector<Tensor>& scales, bool gated) {
  const size_t count = weights.size();
  KFC_CHECK(count > 0 && count <= kMostWeights && count == scales.size() && (!gated || count == 2), op,
            "expected 1 to ", kMostWeights, " weights, 2 with a gate, and a scale for each");
  const int32_t numbers = options_of(weights[0]).dtype;
  const Options scale_options = options_of(scales[0]);
  a.scale_dtype = dtype_of(op, scale_options);
  const bool is_int8 = numbers == aoti_torch_dtype_int8();
  KFC_CHECK(is_int8 || numbers == aoti_torch_dtype_float8_e4m3fn(), op, "weight is neither int8 nor float8_e4m3fn");
  KFC_CHECK(a.scale_dtype != DType::f64, op, "the kernel takes no scales of float64");
  a.numbers = is_int8 ? Numbers::int8 : Numbers::float8;
  for (size_t i = 0; i < count; ++i) {
    scales[i] = checked_scale(op, x, weights[i], scales[i], numbers, scale_options.dtype);
    if (i > 0) {
      a.weights[i - 1] = weights[i].const_data_ptr();
      a.scales[i - 1] = scales[i].const_data_ptr();
      a.starts[i - 1] = a.out;
    }
    a.out += weights[i].size(0);
  }
  for (size_t i = count; i < kMostWeights; ++i) a.starts[i - 1] = std::numeric_limits<int64_t>::max();
  KFC_CHECK(!gated || a.out == 2 * weights[0].size(0), op, "a gate and its factor have the same features");
  if (gated) a.out /= 2;
  a.weight = weights[0].const_data_ptr();
  a.scale = scales[0].const_data_ptr();
  a.weight_stride = weights[0].size(1);
}

template <class Backend>
Tensor quantized_linear(const Tensor& x_in, std::vector<Tensor> weights, std::vector<Tensor> scales, int64_t activation,
                        double slope, bool gated) {
  const char* op = "quantized_linear";
  const Options options = options_of(x_in);
  SkinnyProduct a{};
  a.dtype = dtype_of(op, options);
  set_quantized_weights(a, op, x_in, weights, scales, gated);
  set_call(a, x_in, weights[0].size(1), activation, slope, gated, true);
  const int64_t rows = a.rows;
  KFC_CHECK(has_kernel<Backend>(a, x_in, kMostLaunches * kSkinnyRows), op, "the kernel takes 1 to ",
            kMostLaunches * kSkinnyRows, " rows of float16 or bfloat16 elements");
  const Tensor x = as_aligned(x_in);
  a.x_stride = a.in;
  std::vector<int64_t> sizes = sizes_of(x_in);
  sizes.back() = a.out;
  const Tensor y = empty(options, sizes);
  constexpr int64_t kHalf = 2;  // bytes
  for (int64_t row = 0; row < rows; row += kSkinnyRows) {
    a.rows = rows - row < kSkinnyRows ? rows - row : kSkinnyRows;
    a.x = static_cast<const char*>(x.const_data_ptr()) + row * a.in * kHalf;
    a.y = static_cast<char*>(y.mutable_data_ptr()) + row * a.out * kHalf;
    Backend::skinny_product(a, x);
  }
  return y;
}

}  // namespace kfc
