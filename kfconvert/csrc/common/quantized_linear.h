// Host side of quantized_linear, for a backend that has kernels for products of a few rows: (x W^T) * scale with a
// weight of int8 or float8 numbers.
#pragma once

#include "skinny_linear.h"

namespace kfc {

template <class Backend>
Tensor quantized_linear(const Tensor& x_in, const Tensor& weight, const Tensor& scale_in) {
  const char* op = "quantized_linear";
  const Options options = options_of(x_in);
  const Options weight_options = options_of(weight);
  const Options scale_options = options_of(scale_in);
  SkinnyProduct a{};
  a.dtype = dtype_of(op, options);
  a.scale_dtype = dtype_of(op, scale_options);
  check_same_device(op, "weight", options, weight_options);
  check_same_device(op, "scale", options, scale_options);
  const bool is_int8 = weight_options.dtype == aoti_torch_dtype_int8();
  KFC_CHECK(is_int8 || weight_options.dtype == aoti_torch_dtype_float8_e4m3fn(), op,
            "weight is neither int8 nor float8_e4m3fn");
  a.numbers = is_int8 ? Numbers::int8 : Numbers::float8;
  KFC_CHECK(weight.dim() == 2 && x_in.dim() >= 1 && x_in.size(x_in.dim() - 1) == weight.size(1) &&
                scale_in.numel() == weight.size(0),
            op, "x, weight and scale of shapes ", shape_text(x_in), ", ", shape_text(weight), " and ",
            shape_text(scale_in), " do not fit");
  a.in = weight.size(1);
  a.out = weight.size(0);
  a.rows = a.in > 0 ? x_in.numel() / a.in : 0;
  const bool is_half = a.dtype == DType::f16 || a.dtype == DType::bf16;
  KFC_CHECK(is_half && a.scale_dtype != DType::f64 && a.rows > 0 && a.rows <= kSkinnyRows && a.out > 0 &&
                a.in % 16 == 0 && Backend::has_tensor_cores(x_in),
            op, "the kernel takes 1 to ", kSkinnyRows, " rows of a multiple of 16 float16 or bfloat16 elements");
  const bool in_words = weight.stride(1) == 1 && has_words(weight.const_data_ptr(), weight.stride(0), 1);
  const Tensor words = in_words ? weight : contiguous_copy(weight);
  a.weight = words.const_data_ptr();
  a.weight_stride = words.stride(0);
  const Tensor x = as_aligned(x_in);
  a.x = x.const_data_ptr();
  a.x_stride = a.in;
  const Tensor scale = as_contiguous(scale_in);
  a.scale = scale.const_data_ptr();
  std::vector<int64_t> sizes = sizes_of(x_in);
  sizes.back() = a.out;
  const Tensor y = empty(options, sizes);
  a.y = y.mutable_data_ptr();
  Backend::skinny_product(a, x);
  return y;
}

}  // namespace kfc
