// What the host side of every operator needs on top of the stable ABI: checks, layouts and output allocation.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"

// Its name in torch 2.11.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace kfc {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// One line for the user: no file and line of this source, which would say nothing to her.
template <class... Args>
[[noreturn]] void fail(const char* op, const Args&... message) {
  std::ostringstream text;
  text << "kfconvert::" << op << ": ";
  ((text << message), ...);
  throw std::runtime_error(text.str());
}

// A macro, so that the message is only put together when it is needed.
#define KFC_CHECK(condition, op, ...)             \
  do {                                            \
    if (!(condition)) kfc::fail(op, __VA_ARGS__); \
  } while (0)

inline std::string shape_text(const std::vector<int64_t>& sizes) {
  std::ostringstream text;
  text << "(";
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << ")";
  return text.str();
}

inline std::vector<int64_t> sizes_of(const Tensor& t) {
  const auto sizes = t.sizes();
  return std::vector<int64_t>(sizes.begin(), sizes.end());
}

inline std::string shape_text(const Tensor& t) { return shape_text(sizes_of(t)); }

struct Options {
  int32_t dtype;
  int32_t device_type;
  int32_t device_index;
};

inline Options options_of(const Tensor& t) {
  Options o{};
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &o.dtype));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &o.device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &o.device_index));
  return o;
}

inline DType dtype_of(const char* op, const Options& o) {
  if (o.dtype == aoti_torch_dtype_float32()) return DType::f32;
  if (o.dtype == aoti_torch_dtype_float64()) return DType::f64;
  if (o.dtype == aoti_torch_dtype_float16()) return DType::f16;
  if (o.dtype == aoti_torch_dtype_bfloat16()) return DType::bf16;
  fail(op, "expected float64, float32, float16 or bfloat16");
}

// Of what is computed from tensors of a dtype.
inline Options accumulator(const Options& o, DType dtype) {
  return {dtype == DType::f64 ? aoti_torch_dtype_float64() : aoti_torch_dtype_float32(), o.device_type, o.device_index};
}

inline void check_same_device(const char* op, const char* name, const Options& x, const Options& other) {
  KFC_CHECK(other.device_type == x.device_type && other.device_index == x.device_index, op, name,
            " is on another device than x");
}

// None that Python hands over where the schema has a tensor.
inline void check_given(const char* op, const char* name, const Tensor& t) {
  KFC_CHECK(t.defined(), op, name, " must be a tensor, got None");
}

inline void check_same_options(const char* op, const char* name, const Options& x, const Tensor& t) {
  check_given(op, name, t);
  const Options other = options_of(t);
  check_same_device(op, name, x, other);
  KFC_CHECK(other.dtype == x.dtype, op, name, " has another dtype than x");
}

inline void check_same_shape(const char* op, const char* name, const Tensor& x, const Tensor& t) {
  bool same = x.dim() == t.dim();
  for (int64_t i = 0; same && i < x.dim(); ++i) same = x.size(i) == t.size(i);
  KFC_CHECK(same, op, name, " has shape ", shape_text(t), ", expected ", shape_text(x));
}

// t has the trailing sizes of x, at least `least` of them, after any number of leading sizes of 1.
inline void check_repeats(const char* op, const char* name, const Tensor& x, const Tensor& t, int64_t least) {
  int64_t first = 0;
  while (first < t.dim() && t.size(first) == 1) ++first;
  const int64_t offset = x.dim() - t.dim();
  bool fits = t.dim() >= least && offset >= 0;
  for (int64_t i = t.dim() - least; fits && i < first; ++i) fits = x.size(offset + i) == 1;
  for (int64_t i = first; fits && i < t.dim(); ++i) fits = t.size(i) == x.size(offset + i);
  KFC_CHECK(fits, op, name, " has shape ", shape_text(t), ", expected ", shape_text(x),
            " or what repeats over its leading dimensions");
}

inline Tensor empty_strided(const Options& o, int64_t dim, const int64_t* sizes, const int64_t* strides) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dim, sizes, strides, o.dtype, o.device_type, o.device_index, &handle));
  return Tensor(handle);
}

inline std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (int64_t i = static_cast<int64_t>(sizes.size()) - 2; i >= 0; --i) {
    strides[i] = strides[i + 1] * (sizes[i + 1] > 1 ? sizes[i + 1] : 1);
  }
  return strides;
}

inline Tensor empty(const Options& o, const std::vector<int64_t>& sizes) {
  return empty_strided(o, static_cast<int64_t>(sizes.size()), sizes.data(), contiguous_strides(sizes).data());
}

// The same elements with other sizes and strides; the last argument of the call is added to t's own storage offset.
inline Tensor view(const Tensor& t, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(t.get(), static_cast<int64_t>(sizes.size()),
                                                               sizes.data(), strides.data(), 0, &handle));
  return Tensor(handle);
}

inline void copy_into(const Tensor& to, const Tensor& from) {
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(to.get(), from.get(), 0));
}

inline Tensor contiguous_copy(const Tensor& t) {
  Tensor copy = empty(options_of(t), sizes_of(t));
  copy_into(copy, t);
  return copy;
}

inline Tensor as_contiguous(const Tensor& t) { return t.is_contiguous() ? t : contiguous_copy(t); }

// Whether rows, so many elements of a size apart, can be read in words of 16 bytes.
inline bool has_words(const void* data, int64_t stride, int64_t element = 2) {
  constexpr int64_t kWord = 16;
  return reinterpret_cast<uintptr_t>(data) % kWord == 0 && stride * element % kWord == 0;
}

// Whether the elements fill one block of memory without gaps or overlaps, in whatever order of dimensions.
inline bool is_dense(const Tensor& t) {
  if (t.is_contiguous()) return true;
  const auto sizes = t.sizes();
  const auto strides = t.strides();
  const size_t dim = sizes.size();
  int64_t expected = 1;
  std::vector<bool> used(dim, false);
  for (size_t step = 0; step < dim; ++step) {
    bool found = false;
    for (size_t i = 0; i < dim && !found; ++i) {
      if (used[i]) continue;
      if (sizes[i] == 0) return true;
      if (sizes[i] == 1 || strides[i] == expected) {
        used[i] = found = true;
        if (sizes[i] > 1) expected *= sizes[i];
      }
    }
    if (!found) return false;
  }
  return true;
}

// Whether images are stored as (N, spatial, C). Where that is contiguous as well, they are not.
inline bool is_channels_last(const Tensor& t) {
  const int64_t dim = t.dim();
  if (dim < 4 || dim > 5 || t.is_contiguous()) return false;
  int64_t expected = 1;
  const auto is_next = [&](int64_t i) {
    const bool fits = t.size(i) == 1 || t.stride(i) == expected;
    expected *= t.size(i);
    return fits;
  };
  bool fits = is_next(1);
  for (int64_t i = dim - 1; i > 1; --i) fits = fits && is_next(i);
  return fits && is_next(0);
}

inline bool same_layout(const Tensor& a, const Tensor& b) {
  const auto sizes = a.sizes();
  const auto strides_a = a.strides();
  const auto strides_b = b.strides();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && strides_a[i] != strides_b[i]) return false;
  }
  return true;
}

inline Tensor empty_with_layout_of(const Tensor& dense) {
  return empty_strided(options_of(dense), dense.dim(), dense.sizes().data(), dense.strides().data());
}

// t may have fewer dimensions and sizes of 1 where it is repeated.
inline Tensor copy_with_layout_of(const Tensor& dense, const Tensor& t) {
  Tensor copy = empty_with_layout_of(dense);
  copy_into(copy, t);
  return copy;
}

inline Tensor with_layout_of(const Tensor& dense, const Tensor& t) {
  return same_layout(dense, t) ? t : copy_with_layout_of(dense, t);
}

// What statistics of no elements are.
inline void fill_nan(const OptionalTensor& t) {
  if (t) torch::stable::fill_(*t, std::numeric_limits<double>::quiet_NaN());
}

inline const void* data_or_null(const OptionalTensor& t) { return t ? t->const_data_ptr() : nullptr; }

}  // namespace kfc
