// Memory asked for before it is needed.
#pragma once

#include "convert.h"

namespace {

// Prefetches n elements that are read or written next, in another pass: to wait for them there takes up to a fifth of
// the time.
template <class T>
KFC_FN void fetch_ahead(const T* from, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < n; i += kLine) __builtin_prefetch(from + i);
}

}  // namespace
