// What the kernels of layer and RMS norms share: weight and bias in the accumulation type, the statistics of a row, and
// a row normalised by them.
#pragma once

#include "../common/arguments.h"
#include "fetch_ahead.h"
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

template <class A>
struct RowStatistics {
  A mean;
  A rstd;
};

// The statistics of row r, whose elements are s; they are also stored in a.mean and a.rstd, where these are not null.
template <class A>
RowStatistics<A> statistics_of(const kfc::LayerNorm& a, int64_t r, const A* s) {
  A* none = nullptr;  // s needs no conversion
  const Moments<A> moments = a.centred ? moments_of(s, a.cols, none) : moments_about_zero(s, a.cols, none);
  // Computed in double and rounded once, because an error in rstd is an error of the whole row.
  const A rstd = static_cast<A>(1.0 / __builtin_sqrt(moments.variance + a.eps));
  if (a.mean != nullptr) static_cast<A*>(a.mean)[r] = moments.mean;
  if (a.rstd != nullptr) static_cast<A*>(a.rstd)[r] = rstd;
  return {moments.mean, rstd};
}

// Writes y and the statistics of row r, whose elements are s, of any length. `next` points to what will be read for the
// next row, to be prefetched; null after the last row.
template <class T, class A>
void write_row(const kfc::LayerNorm& a, int64_t r, const A* s, const A* weight, const A* bias, const T* next) {
  alignas(64) A block[kBlock];
  const RowStatistics<A> row = statistics_of(a, r, s);
  T* y = static_cast<T*>(a.y) + r * a.cols;
  for (int64_t i = 0; i < a.cols; i += kBlock) {
    const int64_t n = a.cols - i < kBlock ? a.cols - i : kBlock;
    A* out = result_row(y + i, block);
    if (next != nullptr) {
      fetch_ahead(next + i, n);
      fetch_ahead(y + a.cols + i, n);
    }
    normalize_row(s + i, row.mean, row.rstd, at(weight, i), at(bias, i), out, n);
    activate_row(a.activation, static_cast<const A*>(out), out, n, static_cast<A>(a.slope));
    store_result(out, y + i, n);
  }
}

}  // namespace
