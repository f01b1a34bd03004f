// y = dropout(act(x + bias)) + residual, or with grad: y = dropout(grad) * act'(x + bias): one pass over memory, no
// mask. Limited by the arithmetic of the random words. Built once for each instruction set.
#include "../common/philox.h"
#include "channels.h"
#include "kernels.h"

namespace {

// v[i] = dropout(v[i]), element begin + i; begin is a multiple of 4.
template <class A>
KFC_ROW void drop(const kfc::DropoutAct& a, int64_t begin, A* v, int64_t n) {
  const A scale = static_cast<A>(a.scale);
  const uint32_t dropped = a.dropped;
  const uint64_t seed = a.state == nullptr ? a.seed : static_cast<uint64_t>(a.state[0]);
  const uint64_t sequence = a.state == nullptr ? a.sequence : static_cast<uint64_t>(a.state[1]);
  const uint64_t first = static_cast<uint64_t>(begin) / 4;
  alignas(64) uint32_t words[kBlock + 4];
  const int64_t blocks = (n + 3) / 4;
#pragma omp simd
  for (int64_t i = 0; i < blocks; ++i) {
    const Words block = philox(seed, sequence, first + static_cast<uint64_t>(i));
    for (int j = 0; j < 4; ++j) words[4 * i + j] = block.v[j];
  }
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
