// What kernels that give each thread a pack of elements share: the grid, and division by sizes known at launch.
#pragma once

#include "vector.cuh"

namespace kfc {
namespace {

constexpr int kThreads = 256;
// 8 blocks fill a multiprocessor (2048 threads). Up to 64 times that every thread has one pack: where some have two and
// others one, the last turn leaves the device half empty (67 M floats on an H100: 179 us, 188 with 32 blocks each).
constexpr int64_t kBlocksPerMultiprocessor = 512;

// n / divisor for n < 2^31 as (mulhi(n, multiplier) + n) >> shift, with 2^shift >= divisor.
struct Divider32 {
  uint32_t divisor, multiplier, shift;
  explicit Divider32(int64_t d) : divisor(static_cast<uint32_t>(d)), shift(0) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    multiplier =
        static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }
  __device__ uint32_t divide(uint32_t n) const { return (__umulhi(n, multiplier) + n) >> shift; }
  __device__ uint32_t remainder(uint32_t n) const { return n - divide(n) * divisor; }
};

struct Divider64 {
  uint64_t divisor;
  explicit Divider64(int64_t d) : divisor(static_cast<uint64_t>(d)) {}
  __device__ uint64_t divide(uint64_t n) const { return n / divisor; }
  __device__ uint64_t remainder(uint64_t n) const { return n % divisor; }
};

// 32-bit indices hold while the elements and one step of the whole grid beyond them fit; divisions in 64 bits
// cost ten times more.
constexpr int64_t kMostElements = int64_t{1} << 30;

inline dim3 elementwise_grid(int64_t packs) {
  const int64_t wanted = (packs + kThreads - 1) / kThreads;
  const int64_t most = kBlocksPerMultiprocessor * multiprocessors();
  return dim3(static_cast<unsigned>(wanted < most ? wanted : most));
}

}  // namespace
}  // namespace kfc
