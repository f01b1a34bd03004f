// Rows of elements of an image taken apart at their channels.
#pragma once

#include "../common/arguments.h"
#include "convert.h"

namespace {

// Calls part(channel, i, length, one_channel) for the parts of the elements begin to begin + n: `length` elements from
// begin + i on are those of one channel, or, where inner is 1, one each of the channels from `channel` on.
template <class Arguments, class Part>
KFC_FN void for_channels(const Arguments& a, int64_t begin, int64_t n, Part part) {
  if (a.channels == 1) return part(0, 0, n, true);
  for (int64_t i = 0; i < n;) {
    const int64_t element = begin + i;
    const bool one_channel = a.inner > 1;
    const int64_t period = one_channel ? a.inner : a.channels;
    const int64_t left = period - element % period;
    const int64_t length = left < n - i ? left : n - i;
    part(one_channel ? (element / a.inner) % a.channels : element % a.channels, i, length, one_channel);
    i += length;
  }
}

// v[i] = what the channel of element begin + i makes of x[i]. channels.row(channel, x, v, scratch, n) takes one element
// each of n consecutive channels, channels.run(channel, x, v, n) takes n elements of one channel.
template <class Channels, class Arguments, class X, class V>
KFC_ROW void apply_channels(const Arguments& a, int64_t begin, const X* x, V* v, int64_t n) {
  const Channels channels(a);
  typename Channels::Scratch scratch[kBlock];
  for_channels(a, begin, n, [&](int64_t channel, int64_t i, int64_t length, bool one_channel) {
    if (one_channel) {
      channels.run(channel, x + i, v + i, length);
    } else {
      channels.row(channel, x + i, v + i, scratch, length);
    }
  });
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
