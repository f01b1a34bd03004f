// Host side of skinny_linear, for a backend that has kernels for products of a few rows: act(x W^T + b), or
// act(g) * u with the halves g, u of x W^T + b.
#pragma once

#include "combine_act.h"
#include "library_ops.h"

namespace kfc {

// The most rows of x.
constexpr int64_t kSkinnyRows = 16;

// Sets the layout of the weight; false where the kernels do not take it.
inline bool set_weight(SkinnyProduct& a, const Tensor& weight) {
  a.weight = weight.const_data_ptr();
  a.transposed = weight.stride(1) != 1;
  a.weight_stride = weight.stride(a.transposed ? 1 : 0);
  // A transposed weight is read eight outputs at a time, and no gate lies beside its other half.
  const bool fits = !a.transposed || (weight.stride(0) == 1 && a.out % 8 == 0 && !a.gated);
  return fits && a.in % 8 == 0 && has_words(a.weight, a.weight_stride);
}

// x, contiguous and in words.
inline Tensor as_aligned(const Tensor& x_in) {
  const Tensor x = as_contiguous(x_in);
  return has_words(x.const_data_ptr(), x.size(x.dim() - 1)) ? x : contiguous_copy(x);
}

// Sets what does not depend on the weights.
inline void set_call(SkinnyProduct& a, const Tensor& x, int64_t in, int64_t activation, double slope, bool gated,
                     bool gate_first) {
  a.in = in;
  a.rows = in > 0 ? x.numel() / in : 0;
  a.gated = gated;
  a.gate_first = gate_first;
  a.activation = static_cast<int>(activation);
  a.slope = slope;
}

// Whether there are kernels for this dtype and number of rows, on the device of x.
template <class Backend>
bool has_kernel(const SkinnyProduct& a, const Tensor& x, int64_t most_rows) {
  const bool is_half = a.dtype == DType::f16 || a.dtype == DType::bf16;
  return is_half && a.rows > 0 && a.rows <= most_rows && a.out > 0 && Backend::has_tensor_cores(x);
}

template <class Backend>
Tensor skinny_linear(const Tensor& x_in, const Tensor& weight, const OptionalTensor& bias, int64_t activation,
                     double slope, bool gated, bool gate_first) {
  const char* op = "skinny_linear";
  const Options options = options_of(x_in);
  SkinnyProduct a{};
  a.dtype = dtype_of(op, options);
  check_linear(op, x_in, weight, bias);
  KFC_CHECK(!gated || weight.size(0) % 2 == 0, op, "a gated layer has an even number of features, not ",
            weight.size(0));
  set_call(a, x_in, weight.size(1), activation, slope, gated, gate_first);
  a.out = weight.size(0) / (gated ? 2 : 1);
  if (!has_kernel<Backend>(a, x_in, kSkinnyRows) || (bias && weight.size(0) > 1 && bias->stride(0) != 1) ||
      !set_weight(a, weight)) {
    Tensor product = linear_act<Backend>(x_in, weight, bias, gated ? kNone : activation, slope);
    if (!gated) return product;
    const auto half = [&](bool first) {
      return torch::stable::narrow(product, product.dim() - 1, first ? 0 : a.out, a.out);
    };
    const auto combination = static_cast<int64_t>(Combination::gated);
    return combine_act<Backend>(half(gate_first), half(!gate_first), combination, activation, slope);
  }
  const Tensor x = as_aligned(x_in);
  std::vector<int64_t> sizes = sizes_of(x);
  sizes.back() = a.out;
  a.x = x.const_data_ptr();
  a.x_stride = a.in;
  a.bias = data_or_null(bias);
  const Tensor y = empty(options, sizes);
  a.y = y.mutable_data_ptr();
  Backend::skinny_product(a, x);
  return y;
}

}  // namespace kfc
