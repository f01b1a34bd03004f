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

#include "cluster.cuh"
#include "kernels.h"
#include "vector.cuh"

namespace kfc {
namespace {

constexpr int kBatch = 4;  // packs that a thread loads before it uses the first of them
constexpr int kPartThreads = 256;
constexpr int kMostTileThreads = 512;
constexpr int kTileBytes = 128;                  // of a position that a block reads at least, where there are as many
constexpr int kMostGroups = 64;                  // of a tile: more than one channel each, or all in kTileBytes
constexpr int kThreadsPerMultiprocessor = 1024;  // have enough loads in flight
// A block reads a shorter row sooner than a second kernel starts.
constexpr int64_t kLeastBytes = 65536;
// Each block of the second kernel reads the moments of this many parts in little time.
constexpr int64_t kFewParts = 64;
// One block reads so many batches of packs a thread in less time than two kernels take.
constexpr int64_t kFewTurns = 2;
constexpr int64_t kMostBlocks = (int64_t{1} << 31) - 1;
constexpr int kHeldBytes = 128;          // of a row that a thread holds at most, in registers of 4 bytes
constexpr int kHeldThreads = 512;        // of a block that holds a row or a part of it
constexpr int kShortThreads = 128;       // where there are many rows and each is short
constexpr int64_t kLeastHeld = 8192;     // elements that a block takes in less time than a cluster takes to combine
constexpr int kMostHeldChannels = 1024;  // whose weights and biases shared memory holds
// Memory is read by sectors, of which the groups of a channels-last position each take some in part. Tiles, which take
// groups together, are faster where this costs more than one and a half times the bytes of x, and more than so many.
constexpr int64_t kSectorBytes = 32;
constexpr int64_t kFewExtraBytes = int64_t{1} << 23;

// How many values, their mean, and the sum of the squares of their deviations from it.
template <class A>
struct Moments {
  A count;
  A mean;
  A squares;
};

// From sums over deviations from a pivot. It is one of the values: equal values leave nothing, and the squares lose no
// more digits than their number has, however far the mean is from 0.
template <class A>
__device__ __forceinline__ Moments<A> moments_of(A count, A pivot, A sum, A squares) {
  if (count == A(0)) return {A(0), A(0), A(0)};
  const A deviation = sum / count;
  const A rest = squares - sum * deviation;
  return {count, pivot + deviation, rest < A(0) ? A(0) : rest};
}

template <int N, class A>
__device__ __forceinline__ void add_deviations(const A (&values)[N], A pivot, A& sum, A& squares) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const A deviation = values[j] - pivot;
    sum += deviation;
    squares += deviation * deviation;
  }
}

// Of a thread's share of x[begin] to x[end - 1], which THREADS threads divide by packs.
template <int N, int THREADS, class T>
__device__ __forceinline__ auto moments_of_share(const T* x, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  using P = Pack<T, N>;
  constexpr int64_t kStep = static_cast<int64_t>(THREADS) * N;
  const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * N;
  const A pivot = first < end ? static_cast<A>(widen(x[first])) : A(0);
  A sum = 0;
  A squares = 0;
  int64_t packs = 0;
  for (int64_t at = first; at < end; at += kBatch * kStep) {
    Word<P> words[kBatch] = {};
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (at + b * kStep < end) words[b] = load_word<P>(x + at + b * kStep);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (at + b * kStep >= end) continue;
      A values[N];
      widen_word<T>(words[b], values);
      add_deviations(values, pivot, sum, squares);
      ++packs;
    }
  }
  return moments_of(static_cast<A>(packs * N), pivot, sum, squares);
}

// Of all values of the threads that `sum_of` sums over, `count` of them; pivot: one of the values, the same for all
// threads. All threads get them.
template <class A, class Sum>
__device__ __forceinline__ Moments<A> combined_by(const Moments<A>& own, A pivot, A count, Sum sum_of) {
  const A mean = pivot + sum_of(own.count * (own.mean - pivot)) / count;
  const A deviation = own.mean - mean;
  return {count, mean, sum_of(own.squares + own.count * deviation * deviation)};
}

template <int THREADS, class A>
__device__ __forceinline__ Moments<A> combined(const Moments<A>& own, A pivot, A count, A* shared) {
  return combined_by(own, pivot, count, [&](A value) { return row_sum<THREADS>(value, shared); });
}

// Sums over `width` neighboring lanes, a power of two; all threads of a warp must call it.
template <class A>
__device__ __forceinline__ A team_sum(A value, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// Of a row, from its parts, by `width` neighboring lanes, of which this is lane `member`. A row has `length` elements
// or positions, of `each` values.
template <class A>
__device__ __forceinline__ Moments<A> combined_parts(const GroupNorm& a, int64_t row, int64_t length, A each,
                                                     int member, int width) {
  using Pair = Pack<A, 2>;
  const A* partials = static_cast<const A*>(a.partials) + 2 * row * a.parts;
  const auto count_of = [&](int64_t part) {
    const int64_t left = length - part * a.part;
    return static_cast<A>(left < a.part ? left : a.part);
  };
  const A pivot = partials[0];
  A sum = 0;
  for (int64_t part = member; part < a.parts; part += width) {
    sum += count_of(part) * (partials[2 * part] - pivot);
  }
  const A mean = pivot + team_sum(sum, width) / static_cast<A>(length);
  A squares = 0;
  for (int64_t part = member; part < a.parts; part += width) {
    const Pair moments = load_pack<Pair>(partials + 2 * part);
    const A deviation = moments.v[0] - mean;
    squares += moments.v[1] + each * count_of(part) * deviation * deviation;
  }
  return {each * static_cast<A>(length), mean, team_sum(squares, width)};
}

template <class A>
__device__ __forceinline__ A rstd_of(const GroupNorm& a, const Moments<A>& moments) {
  return rsqrt(moments.squares / moments.count + static_cast<A>(a.eps));
}

template <class A>
__device__ __forceinline__ void leave_statistics(const GroupNorm& a, int64_t row, A mean, A rstd) {
  if (a.mean != nullptr) static_cast<A*>(a.mean)[row] = mean;
  if (a.rstd != nullptr) static_cast<A*>(a.rstd)[row] = rstd;
}

template <class A>
__device__ __forceinline__ void leave_partial(const GroupNorm& a, int64_t row, int64_t part,
                                              const Moments<A>& moments) {
  Pack<A, 2> pair;
  pair.v[0] = moments.mean;
  pair.v[1] = moments.squares;
  store_pack(static_cast<A*>(a.partials) + 2 * (row * a.parts + part), pair);
}

// y of the elements `begin` to `end` - 1 of a contiguous row. From the end on, which was read last for the moments, and
// which the cache therefore still has.
template <int act, class T, int N, int THREADS, class A>
__device__ __forceinline__ void normalize(const GroupNorm& a, int64_t row, int64_t begin, int64_t end, A mean, A rstd) {
  using P = Pack<T, N>;
  constexpr int64_t kStep = static_cast<int64_t>(THREADS) * N;
  const int64_t start = row * a.channels * a.inner;
  const T* x = static_cast<const T*>(a.x) + start;
  T* y = static_cast<T*>(a.y) + start;
  const int64_t first_channel = row % a.groups * a.channels;
  const int64_t first = begin + static_cast<int64_t>(threadIdx.x) * N;
  const int64_t turns = static_cast<uint32_t>(end - begin - 1) / static_cast<uint32_t>(kBatch * kStep);
  for (int64_t at = first + turns * kBatch * kStep; at >= first; at -= kBatch * kStep) {
    Word<P> words[kBatch] = {};
    A scale[kBatch];
    A shift[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t col = at + b * kStep;
      scale[b] = rstd;
      shift[b] = 0;
      if (col >= end) continue;
      words[b] = load_word<P>(x + col);
      // A division of 64-bit integers for each access would cost more than the access.
      const int64_t channel = first_channel + static_cast<uint32_t>(col) / static_cast<uint32_t>(a.inner);
      if (a.weight != nullptr) scale[b] *= widen(static_cast<const T*>(a.weight)[channel]);
      if (a.bias != nullptr) shift[b] = widen(static_cast<const T*>(a.bias)[channel]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int64_t col = at + b * kStep;
      if (col >= end) continue;
      A values[N];
      widen_word<T>(words[b], values);
#pragma unroll
      for (int j = 0; j < N; ++j) values[j] = (values[j] - mean) * scale[b] + shift[b];
      activate_as<act, T>(a.activation, values, static_cast<A>(a.slope));
      store<N>(y + col, values);
    }
  }
}

// How rows are divided that registers hold. A row is runs of `lanes` packs: a channel, or, channels last, the channels
// of a group at one position.
struct Held {
  int threads;    // of a block; 0: rows are too long, or better read otherwise
  int pack;       // elements
  int blocks;     // that hold a row
  unsigned part;  // packs of a block, of the last one what is left
  unsigned packs;
  unsigned lanes;
  unsigned stride;  // elements from a run to the next
};

// A row a cluster of h.blocks blocks, or one block. Each block computes the moments of its part, and sends them to all
// blocks of the cluster, so that one barrier is between the moments and the result. LAST: x is channels last.
template <int act, class T, int N, int THREADS, bool LAST>
__global__ void __launch_bounds__(THREADS, kThreadsPerMultiprocessor / THREADS) held_kernel(GroupNorm a, Held h) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  using P = Pack<T, N>;
  constexpr int kPacks = kHeldBytes / (sizeof(P) < 4 ? 4 : sizeof(P));
  __shared__ A shared[32];
  __shared__ Pack<A, 2> parts[kMostClusterBlocks];
  __shared__ alignas(kPackBytes) A weights[kMostHeldChannels];
  __shared__ alignas(kPackBytes) A biases[kMostHeldChannels];
  const unsigned blocks = h.blocks;
  if (blocks > 1) arrive_at_blocks<false>();
  const unsigned row = blockIdx.x / blocks;
  const unsigned block = blockIdx.x % blocks;
  const unsigned groups = static_cast<unsigned>(a.groups);
  const unsigned channels = static_cast<unsigned>(a.channels);
  const unsigned group = row % groups;
  const int64_t start =
      LAST ? row / groups * a.inner * a.groups * a.channels + group * channels : row * a.channels * a.inner;
  const T* x = static_cast<const T*>(a.x) + start;
  T* y = static_cast<T*>(a.y) + start;
  const unsigned begin = block * h.part;
  const unsigned end = begin + h.part < h.packs ? begin + h.part : h.packs;
  const unsigned first = begin + threadIdx.x;
  const unsigned first_run = first / h.lanes;
  const unsigned first_lane = first % h.lanes;
  const unsigned run_step = THREADS / h.lanes;
  const unsigned lane_step = THREADS % h.lanes;
  // Calls use(which of this thread's packs, its run, its lane).
  const auto each_pack = [&](auto use) {
    unsigned run = first_run;
    unsigned lane = first_lane;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (first + i * THREADS >= end) break;
      use(i, run, lane);
      run += run_step;
      lane += lane_step;
      if (lane >= h.lanes) {
        lane -= h.lanes;
        ++run;
      }
    }
  };
  Word<P> words[kPacks] = {};
  // All loads, of which none waits for another
  each_pack([&](int i, unsigned run, unsigned lane) { words[i] = load_word<P>(x + (run * h.stride + lane * N)); });
  const A anchor = widen(x[0]);
#pragma unroll 1
  for (unsigned c = threadIdx.x; c < channels; c += THREADS) {
    const unsigned channel = group * channels + c;
    weights[c] = a.weight != nullptr ? static_cast<A>(widen(static_cast<const T*>(a.weight)[channel])) : A(1);
    biases[c] = a.bias != nullptr ? static_cast<A>(widen(static_cast<const T*>(a.bias)[channel])) : A(0);
  }
  A values[N];
  widen_word<T>(words[0], values);
  const A pivot = values[0];
  A sum = 0;
  A squares = 0;
  unsigned count = 0;
  each_pack([&](int i, unsigned, unsigned) {
    widen_word<T>(words[i], values);
    add_deviations(values, pivot, sum, squares);
    count += N;
  });
  const Moments<A> own = moments_of(static_cast<A>(count), pivot, sum, squares);
  Moments<A> all = combined<THREADS>(own, anchor, static_cast<A>((end - begin) * N), shared);
  if (blocks > 1) {
    wait_for_blocks();
    if (threadIdx.x < blocks) {
      Pack<A, 2>& there = of_block(parts, threadIdx.x)[block];
      there.v[0] = all.mean;
      there.v[1] = all.squares;
    }
    arrive_at_blocks<true>();
    wait_for_blocks();
    // By some neighboring threads for themselves, which takes no barrier: a thread a block.
    const unsigned other = threadIdx.x % kMostClusterBlocks;
    const unsigned left = h.packs - other * h.part;
    Moments<A> part = {A(0), A(0), A(0)};
    if (other < blocks) {
      part = {static_cast<A>((left < h.part ? left : h.part) * N), parts[other].v[0], parts[other].v[1]};
    }
    all = combined_by(part, parts[0].v[0], static_cast<A>(h.packs * N),
                      [](A value) { return team_sum(value, kMostClusterBlocks); });
  }
  const A rstd = rstd_of(a, all);
  if (threadIdx.x == 0 && block == 0) leave_statistics(a, row, all.mean, rstd);
  each_pack([&](int i, unsigned run, unsigned lane) {
    A scale[N];
    A shift[N];
    if constexpr (LAST) {
      load_wide<N>(weights + lane * N, scale);
      load_wide<N>(biases + lane * N, shift);
    } else {
      const A weight = weights[run];
      const A bias = biases[run];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        scale[j] = weight;
        shift[j] = bias;
      }
    }
    widen_word<T>(words[i], values);
#pragma unroll
    for (int j = 0; j < N; ++j) values[j] = (values[j] - all.mean) * (scale[j] * rstd) + shift[j];
    activate_as<act, T>(a.activation, values, static_cast<A>(a.slope));
    store<N>(y + (run * h.stride + lane * N), values);
  });
}

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
