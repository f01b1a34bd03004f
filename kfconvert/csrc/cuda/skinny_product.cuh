// Products of 1 to 16 rows: what the kernels have in common.
#pragma once

#include "kernels.h"
#include "mma.cuh"

namespace kfc {

// The rows of x, or of the weight, in half of a product of matrices (mma.cuh).
constexpr int kRows = 8;

// Eight elements of a word of the weight as halves of T: the first eight (part 0), or the last.
template <class T, class W>
__device__ __forceinline__ uint4 halves_in(const uint4& word, int part) {
  if constexpr (sizeof(T) == sizeof(W)) {
    return word;
  } else {
    const uint32_t first = part == 0 ? word.x : word.z;
    const uint32_t second = part == 0 ? word.y : word.w;
    return make_uint4(halves_of<T, W>(first, false), halves_of<T, W>(first, true), halves_of<T, W>(second, false),
                      halves_of<T, W>(second, true));
  }
}

// The tensor that has row `at`: `first`, or one of `others`. `at` becomes the number of the row in it.
__device__ __forceinline__ const void* tensor_of(const SkinnyProduct& a, const void* first, const void* const* others,
                                                 int64_t& at) {
  const void* found = first;
  int64_t start = 0;
#pragma unroll
  for (int i = 0; i < kMostWeights - 1; ++i) {
    if (at >= a.starts[i]) {
      found = others[i];
      start = a.starts[i];
    }
  }
  at -= start;
  return found;
}

// The bits of the factor of row `at` of the weight. It is converted where it is needed, see as_factor: a conversion
// waits for the memory.
__device__ __forceinline__ uint32_t factor_bits(const SkinnyProduct& a, int64_t at) {
  const void* scale = tensor_of(a, a.scale, a.scales, at);
  if (a.scale_dtype == DType::f32) return static_cast<const uint32_t*>(scale)[at];
  return static_cast<const uint16_t*>(scale)[at];
}

__device__ __forceinline__ float as_factor(const SkinnyProduct& a, uint32_t bits) {
  if (a.scale_dtype == DType::f32) return __uint_as_float(bits);
  const auto half = static_cast<uint16_t>(bits);
  return a.scale_dtype == DType::f16 ? widen(__ushort_as_half(half)) : widen(__ushort_as_bfloat16(half));
}

// Row `at` of the weight.
template <class T, class W>
__device__ __forceinline__ const W* weight_row(const SkinnyProduct& a, int64_t at) {
  const void* weight = a.weight;
  if constexpr (sizeof(W) < sizeof(T)) weight = tensor_of(a, a.weight, a.weights, at);
  return static_cast<const W*>(weight) + at * a.weight_stride;
}

// What the sums of an output are multiplied by, and what is added to them: of `at`, and with a gate, of its other half.
template <class T>
struct Terms {
  uint32_t factors[2];
  T biases[2];
};

// Called ahead of the sums, which take as long as these loads.
template <class T>
__device__ __forceinline__ Terms<T> terms_of(const SkinnyProduct& a, int64_t at) {
  Terms<T> terms = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (half == 1 && !a.gated) break;
    if (a.scale != nullptr) terms.factors[half] = factor_bits(a, at + half * a.out);
    if (a.bias != nullptr) terms.biases[half] = static_cast<const T*>(a.bias)[at + half * a.out];
  }
  return terms;
}

// Writes act(value + bias) of output `at`, or with `other`, the sum of the other half, act(gate) * up.
template <class T>
__device__ __forceinline__ void finish(const SkinnyProduct& a, int64_t row, int64_t at, const Terms<T>& terms,
                                       float value, float other) {
  if (a.scale != nullptr) {
    value *= as_factor(a, terms.factors[0]);
    other *= as_factor(a, terms.factors[1]);
  }
  if (a.bias != nullptr) {
    value += widen(terms.biases[0]);
    other += widen(terms.biases[1]);
  }
  float activated[1] = {a.gated && !a.gate_first ? other : value};
  activate_as<kAny, T>(a.activation, activated, static_cast<float>(a.slope));
  const float factor = !a.gated ? 1.0f : a.gate_first ? other : value;
  static_cast<T*>(a.y)[row * a.out + at] = narrow<T>(activated[0] * factor);
}

// The product with a weight whose rows are contiguous.
void launch_skinny_rows(const SkinnyProduct& a, cudaStream_t stream);

}  // namespace kfc
