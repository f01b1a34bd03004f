// Sums by channel of what a backward pass computes, in double.
#pragma once

#include "channels.h"
#include "sums.h"

namespace {

// totals[c] += the sum of row[i] over the elements begin + i of channel c
template <class A>
KFC_ROW void add_by_channel(const kfc::BiasAct& a, int64_t begin, const A* row, int64_t n, double* totals) {
  for_channels(a, begin, n, [=](int64_t channel, int64_t i, int64_t length, bool one_channel) {
    if (one_channel) {
      totals[channel] += static_cast<double>(sum_of(row + i, length));
      return;
    }
    double* to = totals + channel;
    const A* from = row + i;
#pragma omp simd
    for (int64_t j = 0; j < length; ++j) to[j] += static_cast<double>(from[j]);
  });
}

inline double* partial_row(const kfc::ChannelTotals& sums, int k, int64_t share, int64_t channels) {
  return static_cast<double*>(sums.partials[k]) + share * channels;
}

}  // namespace
