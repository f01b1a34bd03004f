// Memory for rows of any length.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace {

// `count` rows of accumulation type, for one call.
template <class A>
class Scratch {
 public:
  Scratch(int count, int64_t cols) : stride_(cols / 16 * 16 + 16) {
    data_ = static_cast<A*>(std::aligned_alloc(64, sizeof(A) * static_cast<size_t>(stride_) * count));
    if (data_ == nullptr) std::abort();
  }
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  A* row(int i) const { return data_ + i * stride_; }

 private:
  A* data_;
  int64_t stride_;
};

}  // namespace
