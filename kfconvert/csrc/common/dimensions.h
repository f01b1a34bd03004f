// How tensors that are broadcast lie along the dimensions of a result, in as few dimensions as that takes.
#pragma once

#include <algorithm>
#include <numeric>

#include "host.h"

namespace kfc {

// The strides of t along the dimensions of y, 0 where t is repeated.
inline std::vector<int64_t> strides_along(const Tensor& y, const Tensor& t) {
  std::vector<int64_t> strides(static_cast<size_t>(y.dim()), 0);
  const int64_t offset = y.dim() - t.dim();
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) > 1) strides[static_cast<size_t>(offset + i)] = t.stride(i);
  }
  return strides;
}

// The first `count` dimensions of t as they lie in memory, outermost first.
inline std::vector<int64_t> memory_order(const Tensor& t, int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), int64_t{0});
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return t.stride(i) > t.stride(j); });
  return order;
}

// Adds a dimension of `size` inside of the `dims` that are there, as part of the last of them where every tensor allows
// it; false where there is no room for one more. to[k] are the strides of tensor k, strides[k] its stride along `size`.
template <size_t MOST, size_t TENSORS>
bool add_dimension(int& dims, int64_t (&sizes)[MOST], int64_t* const (&to)[TENSORS], int64_t size,
                   const int64_t (&strides)[TENSORS]) {
  if (size == 1) return true;
  bool joined = dims > 0;
  for (size_t k = 0; joined && k < TENSORS; ++k) joined = to[k][dims - 1] == strides[k] * size;
  if (!joined) {
    if (dims == static_cast<int>(MOST)) return false;
    sizes[dims++] = 1;
  }
  sizes[dims - 1] *= size;
  for (size_t k = 0; k < TENSORS; ++k) to[k][dims - 1] = strides[k];
  return true;
}

}  // namespace kfc
