// Host side of decode_attention, for a backend that has it.
#pragma once

#include "host.h"

namespace kfc {

template <size_t N>
void set_strides(int64_t (&to)[N], const Tensor& t, const int64_t (&dims)[N]) {
  for (size_t i = 0; i < N; ++i) to[i] = t.size(dims[i]) > 1 ? t.stride(dims[i]) : 0;
}

// t: (batch, heads, places, size), the last together in memory.
inline void check_heads(const char* op, const char* name, const Tensor& like, const Tensor& t, int64_t batch,
                        int64_t heads, int64_t places, int64_t size) {
  check_same_options(op, name, options_of(like), t);
  const bool fits =
      t.dim() == 4 && t.size(0) == batch && t.size(1) == heads && t.size(2) == places && t.size(3) == size;
  KFC_CHECK(fits && (size <= 1 || t.stride(3) == 1), op, name, " has shape ", shape_text(t),
            " or a last dimension that is not dense, expected ", shape_text({batch, heads, places, size}));
}

inline void check_angles_of_step(const char* op, const char* name, const Tensor& q, const Tensor& t) {
  check_same_options(op, name, options_of(q), t);
  const bool fits = t.dim() == 4 && (t.size(0) == 1 || t.size(0) == q.size(0)) && t.size(1) == 1 && t.size(2) == 1 &&
                    t.size(3) == q.size(3);
  KFC_CHECK(fits && t.stride(3) == 1, op, name, " has shape ", shape_text(t), ", expected one row of ", q.size(3));
}

inline void check_norm_of_heads(const char* op, const char* name, const Tensor& q, const Tensor& t) {
  check_same_options(op, name, options_of(q), t);
  KFC_CHECK(t.dim() == 1 && t.size(0) == q.size(3) && t.is_contiguous(), op, name, " has shape ", shape_text(t),
            ", expected ", shape_text({q.size(3)}));
}

inline void check_words(const char* op, const char* name, const void* data, const int64_t (&strides)[3],
                        int64_t element) {
  for (const int64_t stride : strides) {
    KFC_CHECK(has_words(data, stride, element), op, name,
              " has heads that do not consist of aligned words of 16 bytes");
  }
}

// Writes k and v to their place in `keys` and `values`, and returns the attention of q.
template <class Backend>
Tensor decode_attention_(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
                         const Tensor& position, const OptionalTensor& mask, const OptionalTensor& cos,
                         const OptionalTensor& sin, const OptionalTensor& q_norm, const OptionalTensor& k_norm,
                         double eps, double offset, double scale) {
  const char* op = "decode_attention_";
  DecodeAttention a{};
  a.dtype = dtype_of(op, options_of(q));
  KFC_CHECK(q.dim() == 4 && keys.dim() == 4 && q.size(2) == 1, op, "q has shape ", shape_text(q),
            ", expected one row of each head");
  a.batch = q.size(0);
  a.heads = q.size(1);
  a.size = q.size(3);
  a.capacity = keys.size(2);
  const int64_t shared = keys.size(1);
  KFC_CHECK(shared > 0 && a.heads % shared == 0, op, shared, " heads of keys for ", a.heads, " of queries");
  a.sharing = a.heads / shared;
  check_heads(op, "q", q, q, a.batch, a.heads, 1, a.size);
  check_heads(op, "k", q, k, a.batch, shared, 1, a.size);
  check_heads(op, "v", q, v, a.batch, shared, 1, a.size);
  check_heads(op, "keys", q, keys, a.batch, shared, a.capacity, a.size);
  check_heads(op, "values", q, values, a.batch, shared, a.capacity, a.size);
  constexpr int64_t kMostBytes = 512;  // of a head
  const int64_t element = a.dtype == DType::f64 ? 8 : a.dtype == DType::f32 ? 4 : 2;
  const int64_t bytes = a.size * element;
  KFC_CHECK(bytes <= kMostBytes && bytes % 16 == 0, op, "a head has ", bytes, " bytes, expected words of 16 bytes, ",
            kMostBytes, " at most");
  check_same_device(op, "position", options_of(q), options_of(position));
  KFC_CHECK(options_of(position).dtype == aoti_torch_dtype_int64() && position.numel() == 1, op,
            "position must be one number, int64");
  KFC_CHECK(cos.has_value() == sin.has_value() && (!cos || a.size % 2 == 0), op, "cos and sin belong together");
  if (cos) {
    check_angles_of_step(op, "cos", q, *cos);
    check_angles_of_step(op, "sin", q, *sin);
    a.cos_stride = cos->size(0) > 1 ? cos->stride(0) : 0;
    a.sin_stride = sin->size(0) > 1 ? sin->stride(0) : 0;
  }
  KFC_CHECK(q_norm.has_value() == k_norm.has_value(), op, "q_norm and k_norm belong together");
  if (q_norm) {
    check_norm_of_heads(op, "q_norm", q, *q_norm);
    check_norm_of_heads(op, "k_norm", q, *k_norm);
  }
  if (mask) {
    const Options options = options_of(*mask);
    check_same_device(op, "mask", options_of(q), options);
    a.boolean = options.dtype == aoti_torch_dtype_bool();
    KFC_CHECK(a.boolean || options.dtype == options_of(q).dtype, op, "mask must be boolean or have the dtype of q");
    const bool fits = mask->dim() == 4 && (mask->size(0) == 1 || mask->size(0) == a.batch) &&
                      (mask->size(1) == 1 || mask->size(1) == a.heads) && mask->size(2) == 1 &&
                      (mask->size(3) == 1 || mask->size(3) == a.capacity);
    KFC_CHECK(fits, op, "mask has shape ", shape_text(*mask), ", expected ",
              shape_text({a.batch, a.heads, 1, a.capacity}), " or what broadcasts to it");
    set_strides(a.mask_strides, *mask, {0, 1, 3});
  }
  set_strides(a.q_strides, q, {0, 1});
  set_strides(a.k_strides, k, {0, 1});
  set_strides(a.v_strides, v, {0, 1});
  set_strides(a.key_strides, keys, {0, 1, 2});
  set_strides(a.value_strides, values, {0, 1, 2});
  a.scale = scale;
  a.q = q.const_data_ptr();
  a.k = k.const_data_ptr();
  a.v = v.const_data_ptr();
  a.keys = keys.mutable_data_ptr();
  a.values = values.mutable_data_ptr();
  check_words(op, "keys", a.keys, a.key_strides, element);
  check_words(op, "values", a.values, a.value_strides, element);
  a.position = static_cast<const int64_t*>(position.const_data_ptr());
  a.mask = data_or_null(mask);
  a.cos = data_or_null(cos);
  a.sin = data_or_null(sin);
  a.q_norm = data_or_null(q_norm);
  a.k_norm = data_or_null(k_norm);
  a.eps = eps;
  a.offset = offset;
  const Tensor y = empty(options_of(q), {a.batch, a.heads, 1, a.size});
  a.y = y.mutable_data_ptr();
  if (y.numel() == 0) return y;
  a.parts = Backend::decode_parts(a, q);
  OptionalTensor partials;
  if (a.parts > 1) {
    partials = empty(accumulator(options_of(q), a.dtype), {a.batch * a.heads, a.parts, a.size + 2});
    a.partials = partials->mutable_data_ptr();
  }
  Backend::decode_attention(a, q);
  return y;
}

}  // namespace kfc
