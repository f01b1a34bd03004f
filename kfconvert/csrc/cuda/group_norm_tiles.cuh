// Group norms of channels-last images in tiles: whole groups at all positions, in one part or several.
#pragma once

#include "group_norm_moments.cuh"

namespace kfc {
namespace {

// How channels-last images are divided: a tile is some whole groups of all positions, and a block takes a part of its
// positions. A thread holds one pack of channels, and takes every depth-th position of the part.
struct Tiles {
  int threads;  // of a block
  int lanes;    // packs of channels of a tile; the last tile of an image may have fewer
  int depth;    // positions that are read at a time
  int count;    // of an image
  int team;     // neighboring threads that share the work for a group
  int parts;
  int64_t part;  // positions
};

template <int N>
struct PartOfTile {
  int64_t image;
  int64_t part;
  int64_t begin;  // the positions
  int64_t end;
  int64_t first_channel;
  int channels;
  int lane;  // of this thread
  int level;
  bool active;

  __device__ PartOfTile(const GroupNorm& a, const Tiles& t) {
    const unsigned parts = static_cast<unsigned>(t.parts);
    const unsigned tile = blockIdx.x / parts;
    part = blockIdx.x % parts;
    image = tile / static_cast<unsigned>(t.count);
    begin = part * t.part;
    end = begin + t.part < a.inner ? begin + t.part : a.inner;
    first_channel = static_cast<int64_t>(tile % static_cast<unsigned>(t.count)) * t.lanes * N;
    const int64_t left = a.groups * a.channels - first_channel;
    channels = left < t.lanes * N ? static_cast<int>(left) : t.lanes * N;
    lane = threadIdx.x % t.lanes;
    level = threadIdx.x / t.lanes;
    active = level < t.depth && lane * N < channels;
  }

  __device__ int64_t row(const GroupNorm& a, int group) const {
    return image * a.groups + first_channel / a.channels + group;
  }

  // Where this thread's channels are at position 0
  __device__ int64_t start(const GroupNorm& a) const {
    return image * a.inner * a.groups * a.channels + first_channel + lane * N;
  }
};

// Calls leave(group of the tile, its moments in this part) by one thread for each group. Between the threads, the
// moments of channel c of level l are at (c % N) * pitch + l * lanes + c / N, so that neither neighboring threads nor
// neighboring channels share a bank of shared memory.
template <class T, int N, class Leave>
__device__ __forceinline__ void moments_of_tile(const GroupNorm& a, const Tiles& t, const PartOfTile<N>& p,
                                                Leave leave) {
  using A = typename Accumulate<T>::type;
  using P = Pack<T, N>;
  constexpr unsigned pitch = kMostTileThreads + 32 / N;
  __shared__ A means[N * pitch];
  __shared__ A squares_of[N * pitch];
  const int length = static_cast<int>(p.end - p.begin);
  const int turns = length / t.depth;
  const int rest = length % t.depth;
  const auto count_of = [&](int level) { return static_cast<A>(turns + (level < rest ? 1 : 0)); };
  if (p.active) {
    A pivot[N] = {};
    A sum[N] = {};
    A squares[N] = {};
    const int64_t step = a.groups * a.channels;
    const T* x = static_cast<const T*>(a.x) + p.start(a);
    if (p.level < length) load<N>(x + (p.begin + p.level) * step, pivot);
    for (int64_t at = p.begin + p.level; at < p.end; at += kBatch * t.depth) {
      Word<P> words[kBatch] = {};
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (at + b * t.depth < p.end) words[b] = load_word<P>(x + (at + b * t.depth) * step);
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        if (at + b * t.depth >= p.end) continue;
        A values[N];
        widen_word<T>(words[b], values);
#pragma unroll
        for (int j = 0; j < N; ++j) {
          const A deviation = values[j] - pivot[j];
          sum[j] += deviation;
          squares[j] += deviation * deviation;
        }
      }
    }
    const A count = count_of(p.level);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const Moments<A> own = moments_of(count, pivot[j], sum[j], squares[j]);
      means[j * pitch + threadIdx.x] = own.mean;
      squares_of[j * pitch + threadIdx.x] = own.squares;
    }
  }
  __syncthreads();
  const int channels = static_cast<int>(a.channels);
  const int groups = p.channels / channels;
  const int levels = t.depth < length ? t.depth : length;
  const int team = threadIdx.x / t.team;
  const int teams = t.threads / t.team;
  // A member takes every so many-th of the (level, channel) of its group, without a division for each.
  const int member = threadIdx.x % t.team;
  const int first_level = member / channels;
  const int first_channel = member % channels;
  const int level_step = t.team / channels;
  const int channel_step = t.team % channels;
  const A total = static_cast<A>(length) * static_cast<A>(channels);
  for (int first = 0; first < groups; first += teams) {
    const bool given = first + team < groups;
    const int group = given ? first + team : 0;
    const unsigned start = group * channels;
    const auto each = [&](auto add) {
      int channel = first_channel;
      for (int level = first_level; level < levels; level += level_step) {
        const unsigned c = start + channel;
        add(count_of(level), (c % N) * pitch + level * t.lanes + c / N);
        channel += channel_step;
        if (channel >= channels) {
          channel -= channels;
          ++level;
        }
      }
    };
    const A pivot = means[(start % N) * pitch + start / N];
    A sum = 0;
    each([&](A count, unsigned at) { sum += count * (means[at] - pivot); });
    const A mean = pivot + team_sum(sum, t.team) / total;
    A squares = 0;
    each([&](A count, unsigned at) {
      const A deviation = means[at] - mean;
      squares += squares_of[at] + count * deviation * deviation;
    });
    squares = team_sum(squares, t.team);
    if (given && member == 0) leave(group, Moments<A>{total, mean, squares});
  }
}

// Of N channels; a pack of them is read in one access where it can be.
template <int N, class T, class A>
__device__ __forceinline__ void read_channels(const void* values, int64_t channel, A otherwise, A (&to)[N]) {
  const T* from = static_cast<const T*>(values) + channel;
  if (values == nullptr) {
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = otherwise;
  } else if (N > 1 && reinterpret_cast<uintptr_t>(values) % kPackBytes == 0) {
    load<N>(from, to);
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = widen(from[j]);
  }
}

// What the threads of a block share: of each group of the tile.
template <class A>
struct Statistics {
  A mean[kMostGroups];
  A rstd[kMostGroups];
};

template <int N, class A>
__device__ __forceinline__ void keep(const GroupNorm& a, const PartOfTile<N>& p, int group, const Moments<A>& moments,
                                     Statistics<A>& kept) {
  const A rstd = rstd_of(a, moments);
  kept.mean[group] = moments.mean;
  kept.rstd[group] = rstd;
  if (p.part == 0) leave_statistics(a, p.row(a, group), moments.mean, rstd);
}

// y of the part, from its end on, as above
template <int act, class T, int N, class A>
__device__ __forceinline__ void normalize_tile(const GroupNorm& a, const Tiles& t, const PartOfTile<N>& p,
                                               const Statistics<A>& kept) {
  using P = Pack<T, N>;
  if (!p.active) return;
  A mean[N];
  A scale[N];
  A shift[N];
  read_channels<N, T>(a.weight, p.first_channel + p.lane * N, A(1), scale);
  read_channels<N, T>(a.bias, p.first_channel + p.lane * N, A(0), shift);
  const int channels = static_cast<int>(a.channels);
  int group = p.lane * N / channels;
  int left = channels - p.lane * N % channels;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    if (left == 0) {
      ++group;
      left = channels;
    }
    --left;
    mean[j] = kept.mean[group];
    scale[j] *= kept.rstd[group];
  }
  const int64_t step = a.groups * a.channels;
  const T* x = static_cast<const T*>(a.x) + p.start(a);
  T* y = static_cast<T*>(a.y) + p.start(a);
  const int64_t first = p.begin + p.level;
  const int turns = static_cast<int>(p.end - p.begin - 1) / (kBatch * t.depth);
  for (int64_t at = first + turns * kBatch * t.depth; at >= first; at -= kBatch * t.depth) {
    Word<P> words[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (at + b * t.depth < p.end) words[b] = load_word<P>(x + (at + b * t.depth) * step);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (at + b * t.depth >= p.end) continue;
      A values[N];
      widen_word<T>(words[b], values);
#pragma unroll
      for (int j = 0; j < N; ++j) values[j] = (values[j] - mean[j]) * scale[j] + shift[j];
      activate_as<act, T>(a.activation, values, static_cast<A>(a.slope));
      store<N>(y + (at + b * t.depth) * step, values);
    }
  }
}

// A tile that is one part
template <int act, class T, int N>
__global__ void __launch_bounds__(kMostTileThreads, kThreadsPerMultiprocessor / kMostTileThreads)
    tile_kernel(GroupNorm a, Tiles t) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ Statistics<A> kept;
  const PartOfTile<N> p(a, t);
  moments_of_tile<T>(a, t, p, [&](int group, const Moments<A>& moments) { keep(a, p, group, moments, kept); });
  __syncthreads();
  normalize_tile<act, T>(a, t, p, kept);
}

template <class T, int N>
__global__ void __launch_bounds__(kMostTileThreads, kThreadsPerMultiprocessor / kMostTileThreads)
    tile_moments_kernel(GroupNorm a, Tiles t) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  const PartOfTile<N> p(a, t);
  moments_of_tile<T>(a, t, p,
                     [&](int group, const Moments<A>& moments) { leave_partial(a, p.row(a, group), p.part, moments); });
}

template <int act, class T, int N>
__global__ void __launch_bounds__(kMostTileThreads, kThreadsPerMultiprocessor / kMostTileThreads)
    tile_result_kernel(GroupNorm a, Tiles t) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ Statistics<A> kept;
  const PartOfTile<N> p(a, t);
  const int groups = p.channels / static_cast<int>(a.channels);
  const int member = threadIdx.x % t.team;
  const int team = threadIdx.x / t.team;
  for (int first = 0; first < groups; first += t.threads / t.team) {
    const bool given = first + team < groups;
    const int group = given ? first + team : 0;
    const Moments<A> all = combined_parts(a, p.row(a, group), a.inner, static_cast<A>(a.channels), member, t.team);
    if (given && member == 0) keep(a, p, group, all, kept);
  }
  __syncthreads();
  normalize_tile<act, T>(a, t, p, kept);
}

int64_t rounded_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

int64_t size_of(DType dtype) { return dtype == DType::f64 ? 8 : dtype == DType::f32 ? 4 : 2; }

}  // namespace
}  // namespace kfc
