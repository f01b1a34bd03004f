// scale = weight / sqrt(variance + eps), shift = bias + (before - mean) * scale, for channels begin to end, in double.
// Built once for each instruction set.
#include "../common/arguments.h"
#include "convert.h"
#include "kernels.h"

namespace {

template <class T>
void fold_batch_norm_range(const kfc::FoldBatchNorm& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const auto read = [](const void* values, int64_t c, double otherwise) -> double {
    A scratch;
    return values == nullptr ? otherwise : *as_accumulator(static_cast<const T*>(values) + c, &scratch, 1);
  };
  for (int64_t c = begin; c < end; ++c) {
    const double scale = read(a.weight, c, 1.0) / __builtin_sqrt(read(a.variance, c, 0.0) + a.eps);
    const double shift = read(a.bias, c, 0.0) + (read(a.before, c, 0.0) - read(a.mean, c, 0.0)) * scale;
    static_cast<A*>(a.scale)[c] = static_cast<A>(scale);
    static_cast<A*>(a.shift)[c] = static_cast<A>(shift);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(fold_batch_norm)(const FoldBatchNorm& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, fold_batch_norm_range<T>(a, begin, end));
}

}  // namespace kfc
