// The backward passes of bias_act, prelu_bias and dropout_act together with the sums by channel that are the gradients
// of bias and slopes: one pass over memory, the sums in double. Built once for each instruction set
// (KFC_CAPABILITY).
#include "channel_totals.h"
#include "dropout.h"
#include "kernels.h"

namespace {

// to[i] = the value of the channel of element begin + i
template <class B, class A>
KFC_ROW void spread_channels(const kfc::BiasAct& a, const void* values, int64_t begin, A* to, int64_t n) {
  const B* from = static_cast<const B*>(values);
  for_channels(a, begin, n, [=](int64_t channel, int64_t i, int64_t length, bool one_channel) {
    if (!one_channel) return load_row(from + channel, to + i, length);
    A value;
    load_row(from + channel, &value, 1);
    for (int64_t j = 0; j < length; ++j) to[i + j] = value;
  });
}

// x + bias, from `scratch` where there is a bias or a half type
template <class T, class A>
KFC_FN const A* biased_row(const kfc::BiasAct& a, int64_t begin, A* scratch, int64_t n) {
  const A* v = as_accumulator(static_cast<const T*>(a.x) + begin, scratch, n);
  if (a.bias == nullptr) return v;
  apply_channels<AddBias<T, A>>(a, begin, v, scratch, n);
  return scratch;
}

// out[i] = g[i] where v[i] is positive, else g[i] * slopes[i]; of_slopes[i] = 0 or g[i] * v[i], in place of v or not
template <class A>
KFC_ROW void prelu_backward_row(const A* g, const A* v, const A* slopes, A* out, A* of_slopes, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const A grad = g[i];
    const A value = v[i];
    of_slopes[i] = value > A(0) ? A(0) : grad * value;
    out[i] = value > A(0) ? grad : grad * slopes[i];
  }
}

template <class T>
void bias_act_gradients_range(const kfc::BiasAct& a, const kfc::ChannelTotals& sums, int64_t begin, int64_t end,
                              int64_t share) {
  using A = typename Accumulate<T>::type;
  const T* residual = static_cast<const T*>(a.residual);
  const T* grad = static_cast<const T*>(a.grad);
  T* y = static_cast<T*>(a.y);
  double* totals = partial_row(sums, 0, share, a.channels);
  alignas(64) A scratch[kBlock];
  alignas(64) A other[kBlock];
  alignas(64) A slopes[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    const A* g = as_accumulator(grad + i, other, n);
    if (y == nullptr) {  // without an activation y would be grad
      add_by_channel(a, i, g, n, totals);
      continue;
    }
    const A* v = biased_row<T>(a, i, scratch, n);
    A* out = result_row(y + i, other);
    if (a.slopes != nullptr) {
      spread_channels<T>(a, a.slopes, i, slopes, n);
      prelu_backward_row(g, v, static_cast<const A*>(slopes), out, scratch, n);
      add_by_channel(a, i, static_cast<const A*>(scratch), n, partial_row(sums, 1, share, a.channels));
    } else {
      if (residual != nullptr) {
        add_rows(v, as_accumulator(residual + i, slopes, n), scratch, n);
        v = scratch;
      }
      activate_backward_row(a.activation, g, v, out, n, static_cast<A>(a.slope));
    }
    add_by_channel(a, i, static_cast<const A*>(out), n, totals);
    store_result(out, y + i, n);
  }
}

template <class T>
void dropout_act_gradients_range(const kfc::DropoutAct& a, const kfc::ChannelTotals& sums, int64_t begin, int64_t end,
                                 int64_t share) {
  using A = typename Accumulate<T>::type;
  const kfc::BiasAct& terms = a.terms;
  const T* grad = static_cast<const T*>(terms.grad);
  T* y = static_cast<T*>(terms.y);
  double* totals = partial_row(sums, 0, share, terms.channels);
  alignas(64) A scratch[kBlock];
  alignas(64) A other[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    A* out = result_row(y + i, other);
    drop(a, i, as_accumulator(grad + i, other, n), out, n);
    if (terms.activation != kNone) {
      const A* v = biased_row<T>(terms, i, scratch, n);
      const A slope = static_cast<A>(terms.slope);
      activate_backward_from_input_row(terms.activation, static_cast<const A*>(out), v, out, n, slope);
    }
    add_by_channel(terms, i, static_cast<const A*>(out), n, totals);
    store_result(out, y + i, n);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(bias_act_gradients)(const BiasAct& a, const ChannelTotals& sums, int64_t begin, int64_t end,
                                            int64_t share) {
  KFC_DISPATCH_DTYPE(a.dtype, bias_act_gradients_range<T>(a, sums, begin, end, share));
}

void KFC_FOR_CAPABILITY(dropout_act_gradients)(const DropoutAct& a, const ChannelTotals& sums, int64_t begin,
                                               int64_t end, int64_t share) {
  KFC_DISPATCH_DTYPE(a.terms.dtype, dropout_act_gradients_range<T>(a, sums, begin, end, share));
}

}  // namespace kfc
