// y = act(x + other), act(x * other) or act(x) * other, broadcast, or the two gradients of one of the last two: one
// pass over memory. Limited as bias_act is: by memory bandwidth, or by the arithmetic of exp and tanh when the data lie
// in the cache. Built once for each instruction set.
#include "convert.h"
#include "kernels.h"

namespace {

// Where elements of both operands lie: the first is number `at` of the result.
struct Place {
  int64_t x;
  int64_t other;
  int64_t left;  // in the row of the innermost dimension
};

KFC_FN Place place_of(const kfc::CombineAct& a, int64_t at) {
  Place place{0, 0, 0};
  for (int dim = a.dims - 1; dim >= 0; --dim) {
    const int64_t outer = at / a.sizes[dim];
    const int64_t here = at - outer * a.sizes[dim];
    place.x += here * a.x.strides[dim];
    place.other += here * a.other.strides[dim];
    if (dim == a.dims - 1) place.left = a.sizes[dim] - here;
    at = outer;
  }
  return place;
}

// n elements, `stride` apart, in the accumulation type: the data themselves where they lie so, else a copy in scratch.
template <class T, class A>
const A* as_row(const void* data, int64_t at, int64_t stride, A* scratch, int64_t n) {
  const T* from = static_cast<const T*>(data) + at;
  if (stride == 1) return as_accumulator(from, scratch, n);
  if (stride == 0) {
    const A value = *as_accumulator(from, scratch, 1);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) scratch[i] = value;
    return scratch;
  }
  for (int64_t i = 0; i < n; ++i) {
    A value;
    scratch[i] = *as_accumulator(from + i * stride, &value, 1);
  }
  return scratch;
}

template <Act act, class A>
KFC_FN void combine_each(kfc::Combination combination, const A* x, const A* other, A* out, int64_t n, A slope) {
  using M = Math<A>;
  if (combination == kfc::Combination::gated) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = activate<act, M>(x[i], slope) * other[i];
  } else if (combination == kfc::Combination::product) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = activate<act, M>(x[i] * other[i], slope);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) out[i] = activate<act, M>(x[i] + other[i], slope);
  }
}

template <class A>
KFC_ROW void combine_rows(const kfc::CombineAct& a, const A* x, const A* other, A* out, int64_t n) {
  const A slope = static_cast<A>(a.slope);
  KFC_DISPATCH_ACTIVATION(a.activation, (combine_each<act>(a.combination, x, other, out, n, slope)));
}

// The gradients of the product or of the gated combination.
template <Act act, class A>
KFC_FN void differentiate_each(kfc::Combination combination, const A* grad, const A* x, const A* other, A* of_x,
                               A* of_other, int64_t n, A slope) {
  using M = Math<A>;
  if (combination == kfc::Combination::gated) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      // All before the first store, so that both share what they have in common.
      const A g = grad[i];
      const A v = x[i];
      const A activated = activate<act, M>(v, slope);
      of_x[i] = activate_backward_from_input<act, M>(g * other[i], v, slope);
      of_other[i] = activated * g;
    }
  } else {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const A d = activate_backward_from_input<act, M>(grad[i], x[i] * other[i], slope);
      of_x[i] = d * other[i];
      of_other[i] = d * x[i];
    }
  }
}

template <class A>
KFC_ROW void differentiate_rows(const kfc::CombineAct& a, const A* grad, const A* x, const A* other, A* of_x,
                                A* of_other, int64_t n) {
  const A slope = static_cast<A>(a.slope);
  KFC_DISPATCH_ACTIVATION(a.activation,
                          (differentiate_each<act>(a.combination, grad, x, other, of_x, of_other, n, slope)));
}

template <class T>
void combine_act_range(const kfc::CombineAct& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  T* y = static_cast<T*>(a.y);
  T* grad_other = static_cast<T*>(a.grad_other);
  const T* grads = static_cast<const T*>(a.grad);
  const int inner = a.dims - 1;
  alignas(64) A x_scratch[kBlock];
  alignas(64) A other_scratch[kBlock];
  alignas(64) A grad_scratch[kBlock];
  alignas(64) A result[kBlock];
  alignas(64) A other_result[kBlock];
  for (int64_t i = begin; i < end;) {
    const Place place = place_of(a, i);
    int64_t n = place.left;
    if (n > end - i) n = end - i;
    if (n > kBlock) n = kBlock;
    const A* x = as_row<T>(a.x.data, place.x, a.x.strides[inner], x_scratch, n);
    const A* other = as_row<T>(a.other.data, place.other, a.other.strides[inner], other_scratch, n);
    if (grads == nullptr) {
      A* out = result_row(y + i, result);
      combine_rows(a, x, other, out, n);
      store_result(out, y + i, n);
    } else {
      const A* grad = as_accumulator(grads + i, grad_scratch, n);
      A* of_x = result_row(y + i, result);
      A* of_other = result_row(grad_other + i, other_result);
      differentiate_rows(a, grad, x, other, of_x, of_other, n);
      store_result(of_x, y + i, n);
      store_result(of_other, grad_other + i, n);
    }
    i += n;
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(combine_act)(const CombineAct& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, combine_act_range<T>(a, begin, end));
}

}  // namespace kfc
