// What the kernels of layer and RMS norms share: weight and bias in the accumulation type, and a row normalised by
// them.
#pragma once

#include "sums.h"

namespace {

// weight or bias in the accumulation type, or null
template <class T, class Arguments, class A>
KFC_FN const A* load_affine(const void* from, const Arguments& a, A* scratch) {
  if (from == nullptr) return nullptr;
  if (a.affine_dtype == a.dtype) return as_accumulator(static_cast<const T*>(from), scratch, a.cols);
  load_row(static_cast<const float*>(from), scratch, a.cols);
  return scratch;
}

// weight + offset, or null
template <class T, class Arguments, class A>
KFC_FN const A* load_weight(const Arguments& a, A* scratch) {
  const A* weight = load_affine<T>(a.weight, a, scratch);
  if (weight == nullptr || a.offset == 0) return weight;
  const A offset = static_cast<A>(a.offset);
#pragma omp simd
  for (int64_t i = 0; i < a.cols; ++i) scratch[i] = weight[i] + offset;
  return scratch;
}

// Element i of a row that may be null.
template <class A>
KFC_FN const A* at(const A* row, int64_t i) {
  return row == nullptr ? nullptr : row + i;
}

// out[i] = (s[i] - mean) * rstd * weight[i] + bias[i]; weight and bias may be null
template <class A>
KFC_ROW void normalize_row(const A* s, A mean, A rstd, const A* weight, const A* bias, A* out, int64_t n) {
  map_vectors(n, out, [=](auto load) {
    Vector<A> v = (load(s) - mean) * rstd;
    if (weight != nullptr) v *= load(weight);
    return bias == nullptr ? v : v + load(bias);
  });
}

// Rounded once, as its error is one of the whole row.
template <class A>
A rstd_of(const Moments<A>& moments, double eps) {
  return static_cast<A>(1.0 / __builtin_sqrt(moments.variance + eps));
}

}  // namespace
