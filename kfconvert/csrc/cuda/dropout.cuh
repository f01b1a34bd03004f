// Dropout of a pack of elements: which are dropped follows from their number, a seed and a sequence.
#pragma once

#include "../common/philox.h"
#include "vector.cuh"

namespace kfc {
namespace {

struct DropoutState {
  uint64_t seed;
  uint64_t sequence;
  __device__ __forceinline__ explicit DropoutState(const DropoutAct& a)
      : seed(a.state == nullptr ? a.seed : static_cast<uint64_t>(a.state[0])),
        sequence(a.state == nullptr ? a.sequence : static_cast<uint64_t>(a.state[1])) {}
};

// Elements at to at + N - 1 of dropout(v); at is a multiple of N, and N of 4 or 1.
template <int N, class A>
__device__ __forceinline__ void drop(const DropoutAct& a, const DropoutState& state, uint64_t at, A (&v)[N]) {
  const A scale = static_cast<A>(a.scale);
  constexpr int kWords = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += kWords) {
    const Words words = philox(state.seed, state.sequence, (at + i) / 4);
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int word = N < 4 ? static_cast<int>(at % 4) : j;
      v[i + j] = words.v[word] >= a.dropped ? v[i + j] * scale : A(0);
    }
  }
}

}  // namespace
}  // namespace kfc
