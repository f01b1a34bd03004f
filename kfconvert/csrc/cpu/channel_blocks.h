// Rows of channels in blocks of whole channels or parts of one, with what each channel is scaled and shifted by: for
// group_norm_act and its backward.
#pragma once

#include "convert.h"

namespace {

// Calls body(channel, count, begin, n) for each block of a row, which has `channels` channels of `inner` elements. A
// block has n elements of each of the `count` channels from `channel` on, at most kBlock together; they lie in one
// piece from element `begin` of the row on.
template <class Body>
void for_channel_blocks(int64_t channels, int64_t inner, Body body) {
  const int64_t most = inner < kBlock ? kBlock / inner : 1;
  for (int64_t channel = 0; channel < channels; channel += most) {
    const int64_t count = channels - channel < most ? channels - channel : most;
    for (int64_t i = 0; i < inner; i += kBlock) {
      body(channel, count, channel * inner + i, inner - i < kBlock ? inner - i : kBlock);
    }
  }
}

// to[i] = rstd * weight of channel + i of row `row`
template <class T, class Arguments, class A>
KFC_ROW void scales_of_channels(const Arguments& a, int64_t row, int64_t channel, int64_t count, double rstd, A* to) {
  if (a.weight == nullptr) {
    for (int64_t i = 0; i < count; ++i) to[i] = static_cast<A>(rstd);
    return;
  }
  load_row(static_cast<const T*>(a.weight) + row % a.groups * a.channels + channel, to, count);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<A>(rstd * to[i]);
}

// to[i] = bias of channel + i of row `row`
template <class T, class Arguments, class A>
KFC_ROW void shifts_of_channels(const Arguments& a, int64_t row, int64_t channel, int64_t count, A* to) {
  if (a.bias == nullptr) {
    for (int64_t i = 0; i < count; ++i) to[i] = 0;
    return;
  }
  load_row(static_cast<const T*>(a.bias) + row % a.groups * a.channels + channel, to, count);
}

// Each of `count` values n times
template <class A>
KFC_ROW void repeat_each(const A* values, int64_t count, int64_t n, A* to) {
  for (int64_t c = 0; c < count; ++c) {
    const A value = values[c];
    for (int64_t i = 0; i < n; ++i) to[c * n + i] = value;
  }
}

// out[i] = (x[i] - mean) * scale[i] + shift[i]
template <class A>
KFC_ROW void normalize_block(const A* x, A mean, const A* scale, const A* shift, A* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = (x[i] - mean) * scale[i] + shift[i];
}

}  // namespace
