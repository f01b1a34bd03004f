// y = act(gate) * up, and its two gradients: one pass over memory. Limited as bias_act is: by memory bandwidth,
// or by the arithmetic of exp and erf when the data lie in the cache. Built once for each instruction set.
#include "convert.h"
#include "kernels.h"

namespace {

// A block lives in the first-level cache: 4 kB of float or 8 kB of double for each operand.
constexpr int64_t kBlock = 1024;

template <class T>
void act_mul_range(const kfc::ActMul& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  T* y = static_cast<T*>(a.y);
  T* grad_up = static_cast<T*>(a.grad_up);
  const T* grads = static_cast<const T*>(a.grad);
  const A slope = static_cast<A>(a.slope);
  alignas(64) A gate_scratch[kBlock];
  alignas(64) A up_scratch[kBlock];
  alignas(64) A grad_scratch[kBlock];
  alignas(64) A result[kBlock];
  for (int64_t i = begin; i < end;) {
    const int64_t row = i / a.cols;
    const int64_t col = i - row * a.cols;
    int64_t n = a.cols - col;
    if (n > end - i) n = end - i;
    if (n > kBlock) n = kBlock;
    const A* gate = as_accumulator(static_cast<const T*>(a.gate) + row * a.gate_stride + col, gate_scratch, n);
    const A* up = as_accumulator(static_cast<const T*>(a.up) + row * a.up_stride + col, up_scratch, n);
    A* out = result_row(y + i, result);
    if (grads == nullptr) {
      activate_row(a.activation, gate, out, n, slope);
      multiply_rows(out, up, out, n);
    } else {
      const A* grad = as_accumulator(grads + i, grad_scratch, n);
      A* out_up = result_row(grad_up + i, result);
      activate_row(a.activation, gate, out_up, n, slope);
      multiply_rows(out_up, grad, out_up, n);
      store_result(out_up, grad_up + i, n);
      multiply_rows(grad, up, out, n);
      activate_backward_from_input_row(a.activation, out, gate, n, slope);
    }
    store_result(out, y + i, n);
    i += n;
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(act_mul)(const ActMul& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, act_mul_range<T>(a, begin, end));
}

}  // namespace kfc
