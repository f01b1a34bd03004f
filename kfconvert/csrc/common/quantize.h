// Host side of quantize_int8 and dequantize_int8, for any backend. Results are in the input's memory layout.
#pragma once

#include "bias_act.h"

namespace kfc {

// (1), or (channels of x along `dim`); null where there are none. `is_integer`: values need not be in the accumulation
// type.
inline const void* channel_values(const char* op, const char* name, const Tensor& x, DType dtype,
                                  const OptionalTensor& values, int64_t channels, bool is_integer,
                                  std::vector<Tensor>& keep) {
  if (!values) return nullptr;
  const Options options = options_of(*values);
  check_same_device(op, name, options_of(x), options);
  const bool is_double = dtype == DType::f64;
  KFC_CHECK(is_integer || options.dtype == (is_double ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32()), op,
            name, " must be ", is_double ? "float64" : "float32");
  KFC_CHECK(values->dim() == 1 && values->size(0) == channels, op, name, " has shape ", shape_text(*values),
            ", expected (", channels, ",)");
  keep.push_back(as_contiguous(*values));
  return keep.back().const_data_ptr();
}

// The bits of zero points that are integers, where the backend reads them as they are.
template <class Backend>
int bits_of_integers(const OptionalTensor& zero_point) {
  if (!Backend::reads_integer_zero_points || !zero_point) return 0;
  const int32_t dtype = options_of(*zero_point).dtype;
  return dtype == aoti_torch_dtype_int32() ? 32 : dtype == aoti_torch_dtype_int64() ? 64 : 0;
}

// dtype: of the real numbers.
template <class Backend>
Quantize quantize_arguments(const char* op, const Tensor& x, DType dtype, const OptionalTensor& scale,
                            const OptionalTensor& zero_point, double scale_value, double zero_point_value, int64_t dim,
                            std::vector<Tensor>& keep) {
  Quantize a{};
  a.dtype = dtype;
  a.numel = x.numel();
  a.channels = 1;
  a.inner = 1;
  a.scale_value = scale_value;
  a.zero_point_value = zero_point_value;
  const OptionalTensor& any = scale ? scale : zero_point;
  if (any && any->numel() != 1) {
    KFC_CHECK(dim >= -x.dim() && dim < x.dim(), op, "dim ", dim, " is out of range for x of shape ", shape_text(x));
    const int64_t along = dim < 0 ? dim + x.dim() : dim;
    a.channels = x.size(along);
    a.inner = a.channels > 1 ? x.stride(along) : 1;
  }
  a.scale = channel_values(op, "scale", x, dtype, scale, a.channels, false, keep);
  a.zero_point_bits = bits_of_integers<Backend>(zero_point);
  a.zero_point = channel_values(op, "zero_point", x, dtype, zero_point, a.channels, a.zero_point_bits > 0, keep);
  return a;
}

inline Tensor empty_in_layout(const Tensor& dense, int32_t dtype) {
  Options options = options_of(dense);
  options.dtype = dtype;
  return empty_strided(options, dense.dim(), dense.sizes().data(), dense.strides().data());
}

template <class Backend>
Tensor quantize_int8(const Tensor& x_in, const OptionalTensor& scale, const OptionalTensor& zero_point,
                     double scale_value, double zero_point_value, int64_t dim) {
  const char* op = "quantize_int8";
  const DType dtype = dtype_of(op, options_of(x_in));
  const Tensor x = as_dense(x_in);
  std::vector<Tensor> keep;
  Quantize a = quantize_arguments<Backend>(op, x, dtype, scale, zero_point, scale_value, zero_point_value, dim, keep);
  Tensor y = empty_in_layout(x, aoti_torch_dtype_int8());
  a.reals = const_cast<void*>(x.const_data_ptr());
  a.integers = static_cast<int8_t*>(y.mutable_data_ptr());
  if (a.numel > 0) Backend::quantize(a, x);
  return y;
}

// `like`: an empty tensor of the dtype to be returned.
template <class Backend>
Tensor dequantize_int8(const Tensor& q_in, const OptionalTensor& scale, const OptionalTensor& zero_point,
                       double scale_value, double zero_point_value, int64_t dim, const Tensor& like) {
  const char* op = "dequantize_int8";
  const Options options = options_of(like);
  const DType dtype = dtype_of(op, options);
  KFC_CHECK(options_of(q_in).dtype == aoti_torch_dtype_int8(), op, "expected int8");
  const Tensor q = as_dense(q_in);
  std::vector<Tensor> keep;
  Quantize a = quantize_arguments<Backend>(op, q, dtype, scale, zero_point, scale_value, zero_point_value, dim, keep);
  Tensor y = empty_in_layout(q, options.dtype);
  a.integers = static_cast<int8_t*>(const_cast<void*>(q.const_data_ptr()));
  a.reals = y.mutable_data_ptr();
  if (a.numel > 0) Backend::dequantize(a, q);
  return y;
}

}  // namespace kfc
