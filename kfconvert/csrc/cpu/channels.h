// Rows of elements of an image taken apart at their channels.
#pragma once

#include "../common/arguments.h"
#include "convert.h"

namespace {

// v[i] = x[i] after its channel, that of element begin + i; channels.row(channel, x, v, scratch, n) takes consecutive
// channels, an element each, channels.run(channel, x, v, n) many elements of one channel.
template <class Channels, class Arguments, class X, class V>
KFC_ROW void apply_channels(const Arguments& a, int64_t begin, const X* x, V* v, int64_t n) {
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
  typename Channels::Scratch scratch[kBlock];
  for (int64_t i = 0; i < n;) {
    const int64_t channel = (begin + i) % a.channels;
    const int64_t left = a.channels - channel;
    const int64_t length = left < n - i ? left : n - i;
    channels.row(channel, x + i, v + i, scratch, length);
    i += length;
  }
}

// v = x + bias; B is the type of the bias in memory.
template <class B, class A>
struct AddBias {
  using Scratch = A;
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

}  // namespace
