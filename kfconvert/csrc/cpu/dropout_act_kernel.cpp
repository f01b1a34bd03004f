// y = dropout(act(x + bias)) + residual, or with grad: y = dropout(grad) * act'(x + bias): one pass over memory, no
// mask. Limited by the arithmetic of the random words. Built once for each instruction set.
#include "../common/philox.h"
#include "channels.h"
#include "kernels.h"

namespace {

// Words 4 first to 4 first + 4 kBlocks - 1 of common/philox.h, a round for all blocks after the other: as loops over arrays
// the rounds become vector instructions, which takes a sixth of the time of one block after the other.
constexpr int64_t kBlocks = kBlock / 4;
KFC_ROW void philox_blocks(uint64_t seed, uint64_t sequence, uint64_t first, uint32_t* words) {
  alignas(64) uint32_t c[4][kBlocks];
  for (int64_t i = 0; i < kBlocks; ++i) {
    const Words start = philox_counter(sequence, first + static_cast<uint64_t>(i));
    for (int j = 0; j < 4; ++j) c[j][i] = start.v[j];
  }
  PhiloxKey key = philox_key(seed);
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma omp simd
    for (int64_t i = 0; i < kBlocks; ++i) {
      const Words next = philox_round(key, Words{{c[0][i], c[1][i], c[2][i], c[3][i]}});
      c[0][i] = next.v[0];
      c[1][i] = next.v[1];
      c[2][i] = next.v[2];
      c[3][i] = next.v[3];
    }
    key = philox_next(key);
  }
#pragma omp simd
  for (int64_t i = 0; i < kBlocks; ++i) {
    words[4 * i] = c[0][i];
    words[4 * i + 1] = c[1][i];
    words[4 * i + 2] = c[2][i];
    words[4 * i + 3] = c[3][i];
  }
}

// v[i] = dropout(v[i]), element begin + i, of at most kBlock; begin is a multiple of 4.
template <class A>
KFC_ROW void drop(const kfc::DropoutAct& a, int64_t begin, A* v, int64_t n) {
  const A scale = static_cast<A>(a.scale);
  const uint32_t dropped = a.dropped;
  const uint64_t seed = a.state == nullptr ? a.seed : static_cast<uint64_t>(a.state[0]);
  const uint64_t sequence = a.state == nullptr ? a.sequence : static_cast<uint64_t>(a.state[1]);
  alignas(64) uint32_t words[kBlock];
  philox_blocks(seed, sequence, static_cast<uint64_t>(begin) / 4, words);
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) v[i] = words[i] >= dropped ? v[i] * scale : A(0);
}

template <class T>
void dropout_act_range(const kfc::DropoutAct& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const kfc::BiasAct& terms = a.terms;
  const T* x = static_cast<const T*>(terms.x);
  const T* residual = static_cast<const T*>(terms.residual);
  const T* grad = static_cast<const T*>(terms.grad);
  T* y = static_cast<T*>(terms.y);
  const A slope = static_cast<A>(terms.slope);
  alignas(64) A scratch[kBlock];
  alignas(64) A other[kBlock];
  alignas(64) A result[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    const A* v = as_accumulator(x + i, scratch, n);
    if (terms.bias != nullptr) {
      apply_channels<AddBias<T, A>>(terms, i, v, scratch, n);
      v = scratch;
    }
    A* out = result_row(y + i, result);
    if (grad != nullptr) {
      const A* g = as_accumulator(grad + i, other, n);
      for (int64_t j = 0; j < n; ++j) out[j] = g[j];
      drop(a, i, out, n);
      activate_backward_from_input_row(terms.activation, out, v, n, slope);
    } else {
      activate_row(terms.activation, v, out, n, slope);
      drop(a, i, out, n);
      if (residual != nullptr) add_rows(static_cast<const A*>(out), as_accumulator(residual + i, other, n), out, n);
    }
    store_result(out, y + i, n);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(dropout_act)(const DropoutAct& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.terms.dtype, dropout_act_range<T>(a, begin, end));
}

}  // namespace kfc
