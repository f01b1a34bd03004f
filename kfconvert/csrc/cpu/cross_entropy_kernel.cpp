// The loss of each row of logits and its log-sum-exp, or with grad_x the gradient; see CrossEntropy. The logits are
// read once for the loss and once for the gradient. Built once for each instruction set.
#include "../common/arguments.h"
#include "exponentials.h"
#include "kernels.h"
#include "sums.h"

namespace {

template <class T>
void loss_row(const kfc::CrossEntropy& a, int64_t row) {
  using A = typename Accumulate<T>::type;
  alignas(64) A scratch[kBlock];
  alignas(64) A powers[kBlock];
  const T* from = static_cast<const T*>(a.x) + row * a.cols;
  OnlineSum<A> online;
  double sum = 0;
  for (int64_t col = 0; col < a.cols; col += kBlock) {
    const int64_t n = a.cols - col < kBlock ? a.cols - col : kBlock;
    const A* x = as_accumulator(from + col, scratch, n);
    online.add(x, powers, n);
    if (a.smoothing == 0) continue;
    sum += static_cast<double>(sum_of(x, n));
  }
  const A largest = online.largest;
  const A rest = static_cast<A>(std::log(online.total));
  static_cast<A*>(a.lse)[2 * row] = largest;
  static_cast<A*>(a.lse)[2 * row + 1] = rest;
  const int64_t target = a.target[row];
  A loss = 0;
  if (target != a.ignored) {
    const A smoothing = static_cast<A>(a.smoothing);
    A hit;
    loss = (A(1) - smoothing) * (rest + (largest - *as_accumulator(from + target, &hit, 1)));
    if (a.smoothing != 0) loss += smoothing * (rest + (largest - static_cast<A>(sum / static_cast<double>(a.cols))));
  }
  static_cast<A*>(a.loss)[row] = loss;
}

template <class T>
void gradient_row(const kfc::CrossEntropy& a, int64_t row) {
  using A = typename Accumulate<T>::type;
  alignas(64) A scratch[kBlock];
  alignas(64) A result[kBlock];
  const T* from = static_cast<const T*>(a.x) + row * a.cols;
  T* to = static_cast<T*>(a.grad_x) + row * a.cols;
  const int64_t target = a.target[row];
  const A largest = static_cast<const A*>(a.lse)[2 * row];
  const A rest = static_cast<const A*>(a.lse)[2 * row + 1];
  A of_result;
  const A grad = a.grad_stride == 0
                     ? *as_accumulator(static_cast<const T*>(a.grad), &of_result, 1) * *static_cast<const A*>(a.weight)
                     : static_cast<const A*>(a.grad)[row];
  const A smoothing = static_cast<A>(a.smoothing);
  const A everywhere = smoothing / static_cast<A>(a.cols);
  for (int64_t col = 0; col < a.cols; col += kBlock) {
    const int64_t n = a.cols - col < kBlock ? a.cols - col : kBlock;
    A* out = result_row(to + col, result);
    if (target == a.ignored) {
      for (int64_t i = 0; i < n; ++i) out[i] = A(0);
    } else {
      const A* x = as_accumulator(from + col, scratch, n);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) out[i] = grad * (Math<A>::exp_or_zero((x[i] - largest) - rest) - everywhere);
      if (target >= col && target < col + n) {
        const A hit = Math<A>::exp_or_zero((x[target - col] - largest) - rest);
        out[target - col] = grad * (hit - (A(1) - smoothing) - everywhere);
      }
    }
    store_result(out, to + col, n);
  }
}

template <class T>
void cross_entropy_range(const kfc::CrossEntropy& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    if (a.grad_x != nullptr) {
      gradient_row<T>(a, row);
    } else {
      loss_row<T>(a, row);
    }
  }
}

// The result and the weight.
template <class T>
void total_of(const kfc::CrossEntropy& a) {
  using A = typename Accumulate<T>::type;
  double sum = 0;
  int64_t count = 0;
  for (int64_t row = 0; row < a.rows; ++row) {
    sum += static_cast<const A*>(a.loss)[row];
    count += a.target[row] != a.ignored;
  }
  // Where no row counts the mean is 0 / 0.
  const A result = static_cast<A>(a.mean ? sum / static_cast<double>(count) : sum);
  store_row(&result, static_cast<T*>(a.result), 1);
  *static_cast<A*>(a.weight) = a.mean ? A(1) / static_cast<A>(count) : A(1);
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(cross_entropy_total)(const CrossEntropy& a) { KFC_DISPATCH_DTYPE(a.dtype, total_of<T>(a)); }

void KFC_FOR_CAPABILITY(cross_entropy)(const CrossEntropy& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, cross_entropy_range<T>(a, begin, end));
}

}  // namespace kfc
