// y = act(x + bias + residual), act(x * scale + bias), prelu(x + bias), and grad * act'(x + bias + residual): one pass
// over memory.
// Limited by memory bandwidth for relu and the like; by arithmetic for erf and tanh when the data lie in the
// cache. Built once for each instruction set (KFC_CAPABILITY).
#include "channels.h"
#include "kernels.h"

namespace {

// What a channel does to its elements, beside AddBias: v = x * scale + bias.
template <class A>
struct ScaleShift {
  using Scratch = A;
  const A* scale;
  const A* shift;
  explicit ScaleShift(const kfc::BiasAct& a)
      : scale(static_cast<const A*>(a.scale)), shift(static_cast<const A*>(a.bias)) {}
  void row(int64_t channel, const A* x, A* v, A*, int64_t n) const {
    const A* s = scale + channel;
    const A* b = shift + channel;
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) v[i] = x[i] * s[i] + b[i];
  }
  void run(int64_t channel, const A* x, A* v, int64_t n) const {
    const A s = scale[channel];
    const A b = shift[channel];
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) v[i] = x[i] * s + b;
  }
};

// v = x where it is positive, else x * slope; B is the type of the slopes in memory.
template <class B, class A>
struct Prelu {
  using Scratch = A;
  const B* slopes;
  explicit Prelu(const kfc::BiasAct& a) : slopes(static_cast<const B*>(a.slopes)) {}
  void row(int64_t channel, const A* x, A* v, A* scratch, int64_t n) const {
    const A* slope = as_accumulator(slopes + channel, scratch, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) v[i] = x[i] > A(0) ? x[i] : x[i] * slope[i];
  }
  void run(int64_t channel, const A* x, A* v, int64_t n) const {
    A scratch;
    const A slope = *as_accumulator(slopes + channel, &scratch, 1);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) v[i] = x[i] > A(0) ? x[i] : x[i] * slope;
  }
};

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
    if (a.scale != nullptr) {
      apply_channels<ScaleShift<A>>(a, i, v, scratch, n);
      v = scratch;
    } else if (a.bias != nullptr) {
      apply_channels<AddBias<T, A>>(a, i, v, scratch, n);
      v = scratch;
    }
    if (a.slopes != nullptr) {
      apply_channels<Prelu<T, A>>(a, i, v, scratch, n);
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
    store_result(out, y + i, n);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(bias_act)(const BiasAct& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, bias_act_range<T>(a, begin, end));
}

}  // namespace kfc
