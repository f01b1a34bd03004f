// What kernels that give each thread a pack of elements share: the grid, division by sizes known at launch, and what
// belongs to channels.
#pragma once

#include <initializer_list>
#include <type_traits>

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
    multiplier = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
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

// The sizes of dimensions, outermost first, as divisors of all but the outermost.
template <class Divider>
struct Dividers {
  Divider of[kMostDims - 1];
  static_assert(kMostDims == 5, "one divider for each dimension but the first");
  Dividers(const int64_t* sizes, int dims)
      : of{at(sizes, dims, 1), at(sizes, dims, 2), at(sizes, dims, 3), at(sizes, dims, 4)} {}

 private:
  static Divider at(const int64_t* sizes, int dims, int i) { return Divider(i < dims ? sizes[i] : 1); }
};

// Calls move(dim, index) for the index of element `rest` in each of the dimensions.
template <class Index, class Divider, class Move>
__device__ __forceinline__ void for_dimensions(Index rest, int dims, const Dividers<Divider>& sizes, Move move) {
#pragma unroll
  for (int dim = kMostDims - 1; dim > 0; --dim) {
    if (dim >= dims) continue;
    const Index outer = sizes.of[dim - 1].divide(rest);
    move(dim, static_cast<int64_t>(rest - outer * sizes.of[dim - 1].divisor));
    rest = outer;
  }
  move(0, static_cast<int64_t>(rest));
}

// 32-bit indices hold while the elements and one step of the whole grid beyond them fit; divisions in 64 bits
// cost ten times more.
constexpr int64_t kMostElements = int64_t{1} << 30;

inline dim3 elementwise_grid(int64_t packs) {
  const int64_t wanted = (packs + kThreads - 1) / kThreads;
  const int64_t most = kBlocksPerMultiprocessor * multiprocessors();
  return dim3(static_cast<unsigned>(wanted < most ? wanted : most));
}

// How what belongs to the channels of a pack of elements is found.
enum class Channels {
  none,
  pack,    // inner = 1 and channels fill whole packs: a pack of channels
  shared,  // inner fills whole packs: one channel for all
  lanes,   // anything else: each element its own
};

// to[j] = the value of the channel of element at + j
template <Channels kind, int N, class P, class Index, class Divider, class A>
__device__ __forceinline__ void load_channels(const P* from, Index at, const Divider& inner, const Divider& channels,
                                              A (&to)[N]) {
  if constexpr (kind == Channels::pack) {
    load_wide<N>(from + channels.remainder(at), to);
  } else if constexpr (kind == Channels::shared) {
    const A value = widen(from[channels.remainder(inner.divide(at))]);
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = value;
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = widen(from[channels.remainder(inner.divide(at + j))]);
  }
}

// v[j] += the value of the channel of element at + j, where channels have values
template <Channels kind, int N, class P, class Index, class Divider, class A>
__device__ __forceinline__ void add_channels(const P* from, Index at, const Divider& inner, const Divider& channels,
                                             A (&v)[N]) {
  if constexpr (kind != Channels::none) {
    A values[N];
    load_channels<kind>(from, at, inner, channels, values);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] += values[j];
  }
}

// Calls launch with the kind for packs of N elements as a compile-time constant; `values` are read for each channel.
template <int N, class Launch>
void dispatch_channels(int64_t inner, int64_t channels, std::initializer_list<const void*> values, Launch launch) {
  bool all_aligned = true;
  for (const void* value : values) all_aligned = all_aligned && aligned(value);
  if (inner == 1 && channels % N == 0 && all_aligned) {
    launch(std::integral_constant<Channels, Channels::pack>());
  } else if (channels == 1 || (inner > 1 && inner % N == 0)) {
    launch(std::integral_constant<Channels, Channels::shared>());
  } else {
    launch(std::integral_constant<Channels, Channels::lanes>());
  }
}

}  // namespace
}  // namespace kfc
