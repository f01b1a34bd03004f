// y = act(x + bias + residual), act(x * scale + bias), and grad * act'(x + bias + residual): one pass over
// memory.
// Limited by memory bandwidth for relu and the like; by arithmetic for erf and tanh when the data lie in the
// cache. Built once for each instruction set (KFC_CAPABILITY).
#include "convert.h"
#include "kernels.h"

namespace {

// A block lives in the first-level cache: 4 kB of float or 8 kB of double.
constexpr int64_t kBlock = 1024;

// What a channel does to its elements: v = x + bias, or v = x * scale + bias. B is the type of the bias in
// memory. `row`: consecutive channels, an element each; `run`: one channel, many elements.
template <class B, class A>
struct AddBias {
  const B* bias;
  explicit AddBias(const kfc::BiasAct& a) : bias(static_cast<const B*>(a.bias)) {}
  void row(int64_t channel, const A* x, A* v, A* scratch, int64_t n) const {
    add_rows(x, as_accumulator(bias + channel, scratch, n), v, n);
  }
  void run(int64_t channel, const A* x, A* v, int64_t n) const {
    A scratch;
    const A value = *as_accumulator(bias + channel, &scratch, 1);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) v[i] = x[i] + value;
  }
};

template <class A>
struct ScaleShift {
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

// v[i] = x[i] after its channel, that of element begin + i
template <class Channels, class A>
KFC_ROW void apply_channels(const kfc::BiasAct& a, int64_t begin, const A* x, A* v, int64_t n) {
  const Channels channels(a);
  if (a.inner > 1) {
    for (int64_t i = 0; i < n;) {
      const int64_t element = begin + i;
      const int64_t left = a.inner - element % a.inner;
      const int64_t stop = left < n - i ? i + left : n;
      channels.run((element / a.inner) % a.channels, x + i, v + i, stop - i);
      i = stop;
    }
    return;
  }
  A scratch[kBlock];
  for (int64_t i = 0; i < n;) {
    const int64_t channel = (begin + i) % a.channels;
    const int64_t left = a.channels - channel;
    const int64_t length = left < n - i ? left : n - i;
    channels.row(channel, x + i, v + i, scratch, length);
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
    if (a.scale != nullptr) {
      apply_channels<ScaleShift<A>>(a, i, v, scratch, n);
      v = scratch;
    } else if (a.bias != nullptr) {
      apply_channels<AddBias<T, A>>(a, i, v, scratch, n);
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
