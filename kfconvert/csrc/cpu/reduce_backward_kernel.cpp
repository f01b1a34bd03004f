// The gradients of sums over rows of squares, magnitudes or squared differences: grad_x = factor * grad * (2 x, sign(x)
// or 2 (x - other)), grad_other = -grad_x. One pass over memory, limited by its bandwidth. Built once for each
// instruction set.
#include "../common/reduce_terms.h"
#include "convert.h"
#include "kernels.h"

namespace {

// spread[i] = factor * grad of the row of element at + i, for n elements; `scratch` holds as many.
template <class T, class A>
void spread_gradients(const kfc::ReduceBackward& a, int64_t at, A* scratch, A* spread, int64_t n) {
  const int64_t row = at / a.cols;
  const int64_t rows = (at + n - 1) / a.cols + 1 - row;
  const A* grads = a.grad_dtype == a.dtype ? as_accumulator(static_cast<const T*>(a.grad) + row, scratch, rows)
                                           : static_cast<const A*>(a.grad) + row;
  const A factor = static_cast<A>(a.factor);
  int64_t stop = (row + 1) * a.cols - at;
  for (int64_t i = 0; i < n; stop += a.cols) {
    const A value = *grads++ * factor;
    const int64_t end = stop < n ? stop : n;
    for (; i < end; ++i) spread[i] = value;
  }
}

template <class F, class A>
KFC_ROW void differentiate_row(const A* x, const A* other, const A* grad, A* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = F::derivative(x[i], other[i]) * grad[i];
}

template <class A>
KFC_ROW void negate_row(const A* v, A* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = -v[i];
}

template <class F, class T>
void reduce_backward_range(const kfc::ReduceBackward& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const T* xs = static_cast<const T*>(a.x);
  const T* others = static_cast<const T*>(a.other);
  T* grad_x = static_cast<T*>(a.grad_x);
  T* grad_other = static_cast<T*>(a.grad_other);
  alignas(64) A x_scratch[kBlock];
  alignas(64) A other_scratch[kBlock];
  alignas(64) A grad_scratch[kBlock];
  alignas(64) A grad[kBlock];
  alignas(64) A result[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    const A* x = as_accumulator(xs + i, x_scratch, n);
    const A* other = F::binary ? as_accumulator(others + i, other_scratch, n) : x;
    spread_gradients<T>(a, i, grad_scratch, grad, n);
    A* of_x = result_row(grad_x + i, result);
    differentiate_row<F>(x, other, grad, of_x, n);
    store_result(of_x, grad_x + i, n);
    if (!F::binary || grad_other == nullptr) continue;
    A* of_other = result_row(grad_other + i, result);
    negate_row(of_x, of_other, n);
    store_result(of_other, grad_other + i, n);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(reduce_backward)(const ReduceBackward& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DIFFERENTIABLE_TERM(a.term, KFC_DISPATCH_DTYPE(a.dtype, (reduce_backward_range<F, T>(a, begin, end))));
}

}  // namespace kfc
