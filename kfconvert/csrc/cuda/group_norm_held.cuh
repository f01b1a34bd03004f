// Group norms of rows that the registers of a block, or of a cluster of blocks, hold.
#pragma once

#include "cluster.cuh"
#include "group_norm_moments.cuh"

namespace kfc {
namespace {

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

}  // namespace
}  // namespace kfc
