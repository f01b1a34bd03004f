// y = act((x - mean(x)) / sqrt(var(x) + eps) * weight + bias), statistics over a row
//   x, y: (rows, channels, inner), a row the channels of one group of one image, or, channels last, (images, inner,
//   groups * channels);  weight, bias: (groups, channels);  mean, rstd: (rows), where a gradient follows;
//   partials: (rows, parts, 2), the moments of parts of rows
//
// Limited by memory bandwidth. A row that the registers of a block hold, or of a cluster of blocks, is read once.
// Others are read twice: many contiguous rows take a block each, which reads its row the second time mostly from L2.
// Few long rows, and other channels-last images, are cut into parts that fill the device: one kernel leaves the moments
// of each part, a second one combines those of its rows and writes y. Moments are combined in the same order at every
// call.
#include <numeric>

#include "group_norm_held.cuh"
#include "group_norm_tiles.cuh"

namespace kfc {
namespace {

// A block a row. Packs of N elements are of one channel, as N divides inner.
template <int act, class T, int N, int THREADS>
__global__ void __launch_bounds__(THREADS, kThreadsPerMultiprocessor / THREADS) row_kernel(GroupNorm a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[32];
  const int64_t cols = a.channels * a.inner;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const T* x = static_cast<const T*>(a.x) + row * cols;
    const Moments<A> own = moments_of_share<N, THREADS>(x, 0, cols);
    const Moments<A> all = combined<THREADS>(own, static_cast<A>(widen(x[0])), static_cast<A>(cols), shared);
    const A rstd = rstd_of(a, all);
    if (threadIdx.x == 0) leave_statistics(a, row, all.mean, rstd);
    normalize<act, T, N, THREADS>(a, row, 0, cols, all.mean, rstd);
  }
}

// The part of a contiguous row that a block takes.
struct PartOfRow {
  int64_t row;
  int64_t part;
  int64_t begin;
  int64_t end;

  explicit __device__ PartOfRow(const GroupNorm& a) {
    const unsigned parts = static_cast<unsigned>(a.parts);
    row = blockIdx.x / parts;
    part = blockIdx.x % parts;
    begin = part * a.part;
    const int64_t cols = a.channels * a.inner;
    end = begin + a.part < cols ? begin + a.part : cols;
  }
};

template <class T, int N>
__global__ void __launch_bounds__(kPartThreads, kThreadsPerMultiprocessor / kPartThreads)
    part_moments_kernel(GroupNorm a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[32];
  const PartOfRow p(a);
  const T* x = static_cast<const T*>(a.x) + p.row * a.channels * a.inner;
  const Moments<A> own = moments_of_share<N, kPartThreads>(x, p.begin, p.end);
  const A pivot = widen(x[p.begin]);
  const Moments<A> all = combined<kPartThreads>(own, pivot, static_cast<A>(p.end - p.begin), shared);
  if (threadIdx.x == 0) leave_partial(a, p.row, p.part, all);
}

template <int act, class T, int N>
__global__ void __launch_bounds__(kPartThreads, kThreadsPerMultiprocessor / kPartThreads)
    part_result_kernel(GroupNorm a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  const PartOfRow p(a);
  // By each warp for itself, which takes no barrier.
  const Moments<A> all = combined_parts(a, p.row, a.channels * a.inner, A(1), threadIdx.x % 32, 32);
  const A rstd = rstd_of(a, all);
  if (threadIdx.x == 0 && p.part == 0) leave_statistics(a, p.row, all.mean, rstd);
  normalize<act, T, N, kPartThreads>(a, p.row, p.begin, p.end, all.mean, rstd);
}

// Elements of an access. float64 is a reference type: single elements are enough.
int pack_of(const GroupNorm& a) {
  const int64_t pack = kPackBytes / size_of(a.dtype);
  const int64_t together = a.channels_last ? a.groups * a.channels : a.inner;
  const bool packed = a.dtype != DType::f64 && together % pack == 0 && aligned(a.x) && aligned(a.y);
  return packed ? static_cast<int>(pack) : 1;
}

// Into how many parts each of `count` rows or tiles is divided, for blocks of `threads` threads that fill the device.
int64_t parts_wanted(int64_t count, int threads) {
  const int64_t blocks = static_cast<int64_t>(multiprocessors()) * kThreadsPerMultiprocessor / threads;
  return blocks < count ? 1 : blocks / count;
}

Tiles divided(const GroupNorm& a, int64_t lanes, int pack, int threads) {
  const int64_t packs = a.groups * a.channels / pack;
  const int64_t depth = threads / lanes;
  const int64_t count = (packs + lanes - 1) / lanes;
  const int64_t tiles = count * (a.rows / a.groups);
  const int64_t most = (a.inner + depth * kBatch - 1) / (depth * kBatch);
  const int64_t wanted = parts_wanted(tiles, threads);
  int64_t parts = most <= kFewTurns ? 1 : wanted < most ? wanted : most;
  const int64_t part = (a.inner + parts - 1) / parts;
  parts = (a.inner + part - 1) / part;
  if (tiles * parts > kMostBlocks) parts = 0;
  int team = 32;
  while (team > 1 && team * lanes * pack > threads * a.channels) team /= 2;
  return {
      threads, static_cast<int>(lanes), static_cast<int>(depth), static_cast<int>(count), team, static_cast<int>(parts),
      part};
}

// No parts where a tile of whole groups and whole packs is too wide.
Tiles tiles_of(const GroupNorm& a) {
  const int pack = pack_of(a);
  const int64_t packs = a.groups * a.channels / pack;
  const int64_t least = kTileBytes / (pack * size_of(a.dtype));
  const int64_t together = rounded_up(least, a.channels / std::gcd(a.channels, static_cast<int64_t>(pack)));
  const int64_t lanes = together < packs ? together : packs;
  if (lanes > kMostTileThreads) return {};
  const bool alone = a.inner <= kFewTurns * kBatch * (kMostTileThreads / lanes);
  if (alone || lanes > kPartThreads) return divided(a, lanes, pack, kMostTileThreads);
  const Tiles tiles = divided(a, lanes, pack, kPartThreads);
  return tiles.parts > kFewParts ? divided(a, lanes, pack, kMostTileThreads) : tiles;
}

// Whether sectors that groups share cost too much.
bool wastes_sectors(const GroupNorm& a) {
  const int64_t bytes = a.channels * size_of(a.dtype);
  const int64_t extra = kSectorBytes - std::gcd(bytes, kSectorBytes);  // of a position, on average
  return a.channels_last && 2 * extra > 3 * bytes && a.rows * a.inner * extra > kFewExtraBytes;
}

Held held(const GroupNorm& a) {
  const int64_t span = a.channels_last ? a.groups * a.channels : a.inner;
  const int64_t cols = a.channels * a.inner;
  if (a.dtype == DType::f64 || a.channels > kMostHeldChannels || wastes_sectors(a)) return {};
  // Offsets from the start of a row and the number of a block have 32 bits.
  if ((a.channels_last && a.inner * span > kMostBlocks) || a.rows > kMostBlocks / kMostClusterBlocks) return {};
  const auto together = a.channels_last ? a.channels : a.inner;
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(a.x) | reinterpret_cast<uintptr_t>(a.y);
  int64_t pack = kPackBytes / size_of(a.dtype);
  while (together % pack != 0 || addresses % (pack * size_of(a.dtype)) != 0) pack = a.channels_last ? pack / 2 : 1;
  const int64_t packs = cols / pack;
  const int64_t bytes = pack * size_of(a.dtype);
  const int64_t of_thread = kHeldBytes / (bytes < 4 ? 4 : bytes);
  const int64_t most = most_cluster_blocks(held_kernel<kNone, float, 1, kHeldThreads, false>);
  int64_t blocks = 1;
  while (packs > blocks * kHeldThreads * of_thread) blocks *= 2;
  if (blocks > most) return {};
  while (2 * blocks <= most && 2 * blocks * a.rows <= multiprocessors() && cols > 2 * blocks * kLeastHeld) blocks *= 2;
  const bool many = a.rows * kHeldThreads > multiprocessors() * kThreadsPerMultiprocessor;
  return {many && packs <= kShortThreads * of_thread ? kShortThreads : kHeldThreads,
          static_cast<int>(pack),
          static_cast<int>(blocks),
          static_cast<unsigned>((packs + blocks - 1) / blocks),
          static_cast<unsigned>(packs),
          static_cast<unsigned>(together / pack),
          static_cast<unsigned>(span)};
}

// SiLU or nothing follows a group norm in most models; all other activations share the kernels for kAny.
template <class Launch>
void dispatch_activation(int code, Launch launch) {
  if (code == kNone) return launch(std::integral_constant<int, kNone>());
  if (code == kSilu) return launch(std::integral_constant<int, kSilu>());
  launch(std::integral_constant<int, kAny>());
}

template <class T, int N, int THREADS, bool LAST>
void launch_held_by(const GroupNorm& a, const Held& h, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(a.rows) * h.blocks;
  dispatch_activation(a.activation, [&](auto act) {
    launch_clusters(held_kernel<decltype(act)::value, T, N, THREADS, LAST>, grid, THREADS, h.blocks, stream, a, h);
  });
}

template <class T, int N, bool LAST>
void launch_held_as(const GroupNorm& a, const Held& h, cudaStream_t stream) {
  if (h.threads == kShortThreads) return launch_held_by<T, N, kShortThreads, LAST>(a, h, stream);
  launch_held_by<T, N, kHeldThreads, LAST>(a, h, stream);
}

template <class T, int N = kPackBytes / sizeof(T)>
void launch_held(const GroupNorm& a, const Held& h, cudaStream_t stream) {
  if constexpr (N > 1) {
    if (h.pack < N) return launch_held<T, N / 2>(a, h, stream);
  }
  if (a.channels_last) return launch_held_as<T, N, true>(a, h, stream);
  if constexpr (N == 1 || N * sizeof(T) == kPackBytes) launch_held_as<T, N, false>(a, h, stream);
}

template <class T, int N>
void launch_tiles(const GroupNorm& a, cudaStream_t stream) {
  const Tiles t = tiles_of(a);
  const unsigned grid = static_cast<unsigned>(a.rows / a.groups * t.count * t.parts);
  if (t.parts > 1) launch_overlapped(tile_moments_kernel<T, N>, grid, t.threads, stream, a, t);
  dispatch_activation(a.activation, [&](auto act) {
    constexpr int code = decltype(act)::value;
    const auto kernel = t.parts > 1 ? tile_result_kernel<code, T, N> : tile_kernel<code, T, N>;
    launch_overlapped(kernel, grid, t.threads, stream, a, t);
  });
}

template <class T, int N>
void launch_parts(const GroupNorm& a, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(a.rows * a.parts);
  launch_overlapped(part_moments_kernel<T, N>, grid, kPartThreads, stream, a);
  dispatch_activation(a.activation, [&](auto act) {
    launch_overlapped(part_result_kernel<decltype(act)::value, T, N>, grid, kPartThreads, stream, a);
  });
}

template <class T, int N, int THREADS>
void launch_rows(const GroupNorm& a, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(a.rows < kMostBlocks ? a.rows : kMostBlocks);
  dispatch_activation(a.activation, [&](auto act) {
    launch_overlapped(row_kernel<decltype(act)::value, T, N, THREADS>, grid, THREADS, stream, a);
  });
}

template <class T, int N>
void launch_packs(const GroupNorm& a, cudaStream_t stream) {
  if (a.channels_last) return launch_tiles<T, N>(a, stream);
  if (a.parts > 1) return launch_parts<T, N>(a, stream);
  launch_rows<T, N, 512>(a, stream);
}

template <class T>
void launch(const GroupNorm& a, cudaStream_t stream) {
  if constexpr (sizeof(T) < 8) {
    const Held h = held(a);
    if (h.threads > 0) return launch_held<T>(a, h, stream);
    if (pack_of(a) > 1) return launch_packs<T, kPackBytes / sizeof(T)>(a, stream);
  }
  launch_packs<T, 1>(a, stream);
}

}  // namespace

void plan_group_norm(GroupNorm& a) {
  if (held(a).threads > 0) {
    a.parts = 1;
    a.part = a.channels_last ? a.inner : a.channels * a.inner;
    return;
  }
  if (a.channels_last) {
    const Tiles tiles = tiles_of(a);
    a.parts = tiles.parts;
    a.part = tiles.part;
    return;
  }
  const int64_t cols = a.channels * a.inner;
  const int64_t least = static_cast<int64_t>(kPartThreads) * pack_of(a);
  const int64_t wanted = cols * size_of(a.dtype) < kLeastBytes ? 1 : parts_wanted(a.rows, kPartThreads);
  const int64_t most = cols / (least * kBatch);
  const int64_t parts = wanted < most ? wanted : most;
  a.part = parts > 1 ? rounded_up((cols + parts - 1) / parts, least) : cols;
  a.parts = (cols + a.part - 1) / a.part;
}

int launch_group_norm(const GroupNorm& a, void* stream) {
  // The channel of an element of contiguous rows is found with 32 bits.
  if (!a.channels_last && a.channels * a.inner >= int64_t{1} << 32) return cudaErrorInvalidValue;
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
