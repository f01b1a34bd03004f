// y = act(x + bias + residual), and grad * act'(x + bias + residual): one pass over memory.
// Limited by memory bandwidth for relu and the like; by arithmetic for erf and tanh when the data lie in the
// cache. Built once for each instruction set (KFC_CAPABILITY).
#include "convert.h"
#include "kernels.h"

namespace {

// A block lives in the first-level cache: 4 kB of float or 8 kB of double.
constexpr int64_t kBlock = 1024;

// v[i] = x[i] + the bias of element begin + i
template <class T, class A>
KFC_ROW void add_bias(const kfc::BiasAct& a, int64_t begin, const A* x, A* v, int64_t n) {
  const T* bias = static_cast<const T*>(a.bias);
  if (a.inner > 1) {
    for (int64_t i = 0; i < n;) {
      const int64_t element = begin + i;
      const int64_t left = a.inner - element % a.inner;
      const int64_t stop = left < n - i ? i + left : n;
      A scratch;
      const A value = *as_accumulator(bias + (element / a.inner) % a.channels, &scratch, 1);
#pragma omp simd
      for (int64_t j = i; j < stop; ++j) v[j] = x[j] + value;
      i = stop;
    }
    return;
  }
  A scratch[kBlock];
  for (int64_t i = 0; i < n;) {
    const int64_t channel = (begin + i) % a.channels;
    const int64_t left = a.channels - channel;
    const int64_t length = left < n - i ? left : n - i;
    add_rows(x + i, as_accumulator(bias + channel, scratch, length), v + i, length);
    i += length;
  }
}

template <class T>
void bias_act_range(const kfc::BiasAct& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const T* x = static_cast<const T*>(a.x);
  const T* residual = static_cast<const T*>(a.residual);
  const T* grad = static_cast<const T*>(a.grad);
  T* y = static_cast<T*>(a.y);
  const A slope = static_cast<A>(a.slope);
  alignas(64) A scratch[kBlock];
  alignas(64) A other[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    const A* v = as_accumulator(x + i, scratch, n);
    if (a.bias != nullptr) {
      add_bias<T>(a, i, v, scratch, n);
      v = scratch;
    }
    if (residual != nullptr) {
      add_rows(v, as_accumulator(residual + i, other, n), scratch, n);
      v = scratch;
    }
    A* out = result_row(y + i, scratch);
    if (grad != nullptr) {
      activate_backward_row(a.activation, as_accumulator(grad + i, other, n), v, out, n, slope);
    } else {
      activate_row(a.activation, v, out, n, slope);
    }
    if constexpr (!__is_same(T, A)) store_row(out, y + i, n);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(bias_act)(const BiasAct& a, int64_t begin, int64_t end) {
  switch (a.dtype) {
    case DType::f32:
      return bias_act_range<float>(a, begin, end);
    case DType::f64:
      return bias_act_range<double>(a, begin, end);
    case DType::f16:
      return bias_act_range<Float16>(a, begin, end);
    case DType::bf16:
      return bias_act_range<BFloat16>(a, begin, end);
  }
}

}  // namespace kfc
