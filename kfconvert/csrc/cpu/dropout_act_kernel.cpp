// y = dropout(act(x + bias)) + residual, or with grad: y = dropout(grad) * act'(x + bias): one pass over memory, no
// mask. Limited by the arithmetic of the random words. Built once for each instruction set.
#include "channels.h"
#include "dropout.h"
#include "kernels.h"

namespace {

template <class T>
void dropout_act_range(const kfc::DropoutAct& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const kfc::BiasAct& terms = a.terms;
  const T* x = static_cast<const T*>(terms.x);
  const T* residual = static_cast<const T*>(terms.residual);
  const T* grad = static_cast<const T*>(terms.grad);
  T* y = static_cast<T*>(terms.y);
  const A slope = static_cast<A>(terms.slope);
  const bool needs_x = grad == nullptr || terms.activation != kNone;
  alignas(64) A scratch[kBlock];
  alignas(64) A other[kBlock];
  alignas(64) A result[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    const A* v = needs_x ? as_accumulator(x + i, scratch, n) : nullptr;
    if (needs_x && terms.bias != nullptr) {
      apply_channels<AddBias<T, A>>(terms, i, v, scratch, n);
      v = scratch;
    }
    A* out = result_row(y + i, result);
    if (grad != nullptr) {
      drop(a, i, as_accumulator(grad + i, other, n), out, n);
      activate_backward_from_input_row(terms.activation, static_cast<const A*>(out), v, out, n, slope);
    } else {
      if (terms.activation != kNone) {
        activate_row(terms.activation, v, out, n, slope);
        v = out;
      }
      drop(a, i, v, out, n);
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
