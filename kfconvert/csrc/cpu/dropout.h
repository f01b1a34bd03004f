// Dropout of a row of elements: which are dropped follows from their number, a seed and a sequence.
#pragma once

#include "../common/arguments.h"
#include "random_words.h"

namespace {

// to[i] = dropout(from[i]), where from[i] is element number begin + i; n is at most kBlock, and begin a multiple of 4.
template <class A>
KFC_ROW void drop(const kfc::DropoutAct& a, int64_t begin, const A* from, A* to, int64_t n) {
  const A scale = static_cast<A>(a.scale);
  const uint32_t dropped = a.dropped;
  const uint64_t seed = a.state == nullptr ? a.seed : static_cast<uint64_t>(a.state[0]);
  const uint64_t sequence = a.state == nullptr ? a.sequence : static_cast<uint64_t>(a.state[1]);
  alignas(64) uint32_t words[kBlock];
  random_words(seed, sequence, static_cast<uint64_t>(begin) / 4, words);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const A kept = from[i] * scale;
    to[i] = words[i] >= dropped ? kept : A(0);
  }
}

}  // namespace
