// s = x + residual; y = act((s - mean) * rstd * (weight + offset) + bias), with or without the mean, and its
// backward (formulas: common/arguments.h). Two-pass mean and variance on a row that stays in the cache; limited by
// memory bandwidth. Built once for each instruction set (KFC_CAPABILITY).
#include <cstdlib>

#include "convert.h"
#include "kernels.h"

namespace {

// `count` rows of accumulation type, for one call.
template <class A>
class Scratch {
 public:
  Scratch(int count, int64_t cols) : stride_((cols + 15) / 16 * 16) {
    data_ = static_cast<A*>(std::aligned_alloc(64, sizeof(A) * static_cast<size_t>(stride_) * count));
    if (data_ == nullptr) std::abort();
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  A* row(int i) const { return data_ + i * stride_; }

 private:
  A* data_;
  int64_t stride_;
};

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

// The mean of v[i] - shift
template <class A>
KFC_FN A mean_from(const A* v, A shift, int64_t n) {
  A total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += v[i] - shift;
  return total / static_cast<A>(n);
}

// The sum of (v[i] - mean)^2
template <class A>
KFC_FN A sum_of_squares(const A* v, A mean, int64_t n) {
  A squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; ++i) squares += (v[i] - mean) * (v[i] - mean);
  return squares;
}

// out[i] = (s[i] - mean) * rstd * weight[i] + bias[i]; weight and bias may be null
template <class A>
KFC_ROW void normalize_row(const A* s, A mean, A rstd, const A* weight, const A* bias, A* out, int64_t n) {
  if (weight != nullptr && bias != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = (s[i] - mean) * rstd * weight[i] + bias[i];
  } else if (weight != nullptr) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = (s[i] - mean) * rstd * weight[i];
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = (s[i] - mean) * rstd + (bias == nullptr ? A(0) : bias[i]);
  }
}

template <class T>
void layer_norm_range(const kfc::LayerNorm& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const int64_t cols = a.cols;
  const A slope = static_cast<A>(a.slope);
  const Scratch<A> scratch(4, cols);
  const A* weight = load_weight<T>(a, scratch.row(2));
  const A* bias = load_affine<T>(a.bias, a, scratch.row(3));
  for (int64_t r = begin; r < end; ++r) {
    const A* s = as_accumulator(static_cast<const T*>(a.x) + r * cols, scratch.row(0), cols);
    if (a.residual != nullptr) {
      const T* row = static_cast<const T*>(a.residual) + r % a.residual_rows * cols;
      const A* residual = as_accumulator(row, scratch.row(1), cols);
      add_rows(s, residual, scratch.row(0), cols);
      s = scratch.row(0);
      if (a.sum != nullptr) store_row(s, static_cast<T*>(a.sum) + r * cols, cols);
    }
    A mean = 0;
    if (a.centred) {
      mean = mean_from(s, A(0), cols);
      // Else what rounding left over in the mean would be all there is of a row of equal values.
      mean += mean_from(s, mean, cols);
    }
    // In double, so that rstd, an error of the whole row, is rounded once.
    const double variance = static_cast<double>(sum_of_squares(s, mean, cols)) / static_cast<double>(cols);
    const A rstd = static_cast<A>(1.0 / __builtin_sqrt(variance + a.eps));
    T* y = static_cast<T*>(a.y) + r * cols;
    A* out = result_row(y, scratch.row(0));
    normalize_row(s, mean, rstd, weight, bias, out, cols);
    activate_row(a.activation, static_cast<const A*>(out), out, cols, slope);
    store_result(out, y, cols);
    if (a.mean != nullptr) static_cast<A*>(a.mean)[r] = mean;
    if (a.rstd != nullptr) static_cast<A*>(a.rstd)[r] = rstd;
  }
}

template <class T>
void layer_norm_backward_range(const kfc::LayerNormBackward& a, int64_t begin, int64_t end, int64_t partial) {
  using A = typename Accumulate<T>::type;
  const int64_t cols = a.cols;
  const A slope = static_cast<A>(a.slope);
  const Scratch<A> scratch(5, cols);
  A* __restrict xhat = scratch.row(0);
  A* __restrict g = scratch.row(1);
  A* __restrict v = scratch.row(2);
  const A* weight = load_weight<T>(a, scratch.row(3));
  const A* bias = load_affine<T>(a.bias, a, scratch.row(4));
  A* partial_weight =
      a.partial_weight == nullptr ? nullptr : static_cast<A*>(a.partial_weight) + partial * cols;
  A* partial_bias = a.partial_bias == nullptr ? nullptr : static_cast<A*>(a.partial_bias) + partial * cols;
  for (int64_t r = begin; r < end; ++r) {
    const A mean = a.mean == nullptr ? A(0) : static_cast<const A*>(a.mean)[r];
    const A rstd = static_cast<const A*>(a.rstd)[r];
    load_row(static_cast<const T*>(a.s) + r * cols, xhat, cols);
    for (int64_t i = 0; i < cols; ++i) xhat[i] = (xhat[i] - mean) * rstd;
    load_row(static_cast<const T*>(a.grad) + r * cols, g, cols);
    if (a.activation != kNone) {
      normalize_row(static_cast<const A*>(xhat), A(0), A(1), weight, bias, v, cols);
      activate_backward_from_input_row(a.activation, g, static_cast<const A*>(v), cols, slope);
    }
    if (partial_weight != nullptr)
      for (int64_t i = 0; i < cols; ++i) partial_weight[i] += g[i] * xhat[i];
    if (partial_bias != nullptr)
      for (int64_t i = 0; i < cols; ++i) partial_bias[i] += g[i];
    if (weight != nullptr) {
#pragma omp simd
      for (int64_t i = 0; i < cols; ++i) g[i] *= weight[i];
    }
    A total = 0;
    A product = 0;
#pragma omp simd reduction(+ : total, product)
    for (int64_t i = 0; i < cols; ++i) {
      total += g[i];
      product += g[i] * xhat[i];
    }
    total = a.mean == nullptr ? A(0) : total / static_cast<A>(cols);
    product /= static_cast<A>(cols);
    for (int64_t i = 0; i < cols; ++i) g[i] = rstd * (g[i] - total - xhat[i] * product);
    if (a.grad_sum != nullptr) {
      load_row(static_cast<const T*>(a.grad_sum) + r * cols, v, cols);
      for (int64_t i = 0; i < cols; ++i) g[i] += v[i];
    }
    store_row(g, static_cast<T*>(a.grad_x) + r * cols, cols);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(layer_norm)(const LayerNorm& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, layer_norm_range<T>(a, begin, end));
}

void KFC_FOR_CAPABILITY(layer_norm_backward)(const LayerNormBackward& a, int64_t begin, int64_t end,
                                             int64_t partial) {
  KFC_DISPATCH_DTYPE(a.dtype, layer_norm_backward_range<T>(a, begin, end, partial));
}

}  // namespace kfc
