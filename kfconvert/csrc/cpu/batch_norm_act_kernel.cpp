// y = act(x * scale + shift), scale = weight / sqrt(variance + eps), shift = bias - mean * scale, and its backward: one
// pass over memory. Scale and shift are computed in double for each call, of which there is one a thread. Limited by
// memory bandwidth. Built once for each instruction set (KFC_CAPABILITY).
#include "channel_totals.h"
#include "kernels.h"
#include "scratch.h"

namespace {

// What belongs to the channels, in the accumulation type of x; P is the dtype of the parameters.
template <class A>
struct Folded {
  Scratch<A> rows;
  A *scale, *shift, *mean, *rstd;
  explicit Folded(const kfc::BatchNormAct& a)
      : rows(4, a.terms.channels), scale(rows.row(0)), shift(rows.row(1)), mean(rows.row(2)), rstd(rows.row(3)) {
    KFC_DISPATCH_DTYPE(a.dtype, fold<T>(a));
  }
  template <class P>
  void fold(const kfc::BatchNormAct& a) {
    using Wide = typename Accumulate<P>::type;
    const auto read = [](const void* values, int64_t c, double otherwise) -> double {
      Wide wide;
      return values == nullptr ? otherwise : *as_accumulator(static_cast<const P*>(values) + c, &wide, 1);
    };
    for (int64_t c = 0; c < a.terms.channels; ++c) {
      const double inverse = 1.0 / __builtin_sqrt(read(a.variance, c, 0.0) + a.eps);
      const double factor = read(a.weight, c, 1.0) * inverse;
      const double centre = read(a.mean, c, 0.0);
      scale[c] = static_cast<A>(factor);
      shift[c] = static_cast<A>(read(a.bias, c, 0.0) - centre * factor);
      mean[c] = static_cast<A>(centre);
      rstd[c] = static_cast<A>(inverse);
    }
  }
};

// v[i] = x[i] * scale + shift of the channel of element begin + i
template <class A>
KFC_ROW void scale_and_shift(const kfc::BiasAct& a, const Folded<A>& own, int64_t begin, const A* x, A* v, int64_t n) {
  for_channels(a, begin, n, [&](int64_t channel, int64_t i, int64_t length, bool one_channel) {
    const A* s = own.scale + channel;
    const A* b = own.shift + channel;
    if (one_channel) {
      const A factor = *s;
      const A added = *b;
#pragma omp simd
      for (int64_t j = i; j < i + length; ++j) v[j] = x[j] * factor + added;
    } else {
#pragma omp simd
      for (int64_t j = 0; j < length; ++j) v[i + j] = x[i + j] * s[j] + b[j];
    }
  });
}

// xhat[i] = (x[i] - mean) * rstd * g[i], then g[i] *= scale, of the channel of element begin + i
template <class A>
KFC_ROW void weigh_gradient(const kfc::BiasAct& a, const Folded<A>& own, int64_t begin, const A* x, A* xhat, A* g,
                            int64_t n) {
  for_channels(a, begin, n, [&](int64_t channel, int64_t i, int64_t length, bool one_channel) {
    const A* s = own.scale + channel;
    const A* m = own.mean + channel;
    const A* r = own.rstd + channel;
    if (one_channel) {
      const A factor = *s;
      const A mean = *m;
      const A rstd = *r;
#pragma omp simd
      for (int64_t j = i; j < i + length; ++j) {
        const A grad = g[j];
        xhat[j] = (x[j] - mean) * rstd * grad;
        g[j] = grad * factor;
      }
    } else {
#pragma omp simd
      for (int64_t j = 0; j < length; ++j) {
        const A grad = g[i + j];
        xhat[i + j] = (x[i + j] - m[j]) * r[j] * grad;
        g[i + j] = grad * s[j];
      }
    }
  });
}

template <class T>
void batch_norm_act_range(const kfc::BatchNormAct& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const kfc::BiasAct& terms = a.terms;
  const T* x = static_cast<const T*>(terms.x);
  T* y = static_cast<T*>(terms.y);
  const Folded<A> own(a);
  alignas(64) A scratch[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    A* out = result_row(y + i, scratch);
    scale_and_shift(terms, own, i, as_accumulator(x + i, scratch, n), out, n);
    activate_row(terms.activation, static_cast<const A*>(out), out, n, static_cast<A>(terms.slope));
    store_result(out, y + i, n);
  }
}

template <class T>
void batch_norm_act_gradients_range(const kfc::BatchNormAct& a, const kfc::ChannelTotals& sums, int64_t begin,
                                    int64_t end, int64_t share) {
  using A = typename Accumulate<T>::type;
  const kfc::BiasAct& terms = a.terms;
  const T* x = static_cast<const T*>(terms.x);
  const T* grad = static_cast<const T*>(terms.grad);
  T* y = static_cast<T*>(terms.y);
  const Folded<A> own(a);
  alignas(64) A scratch[kBlock];
  alignas(64) A v[kBlock];
  alignas(64) A other[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    const A* values = as_accumulator(x + i, scratch, n);
    scale_and_shift(terms, own, i, values, v, n);
    A* out = result_row(y + i, other);
    const A* g = as_accumulator(grad + i, other, n);
    activate_backward_from_input_row(terms.activation, g, static_cast<const A*>(v), out, n,
                                     static_cast<A>(terms.slope));
    add_by_channel(terms, i, static_cast<const A*>(out), n, partial_row(sums, 1, share, terms.channels));
    weigh_gradient(terms, own, i, values, v, out, n);
    add_by_channel(terms, i, static_cast<const A*>(v), n, partial_row(sums, 0, share, terms.channels));
    store_result(out, y + i, n);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(batch_norm_act)(const BatchNormAct& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.terms.dtype, batch_norm_act_range<T>(a, begin, end));
}

void KFC_FOR_CAPABILITY(batch_norm_act_gradients)(const BatchNormAct& a, const ChannelTotals& sums, int64_t begin,
                                                  int64_t end, int64_t share) {
  KFC_DISPATCH_DTYPE(a.terms.dtype, batch_norm_act_gradients_range<T>(a, sums, begin, end, share));
}

}  // namespace kfc
