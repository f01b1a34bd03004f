// A step of generation after its scores: the token with the largest one of each row, put where the next step takes it
// up, with all that is counted on
//   token[r] = argmax(scores[r, :]);  sequences[r, length] = inputs[r] = token[r]
//
// Limited by latency: separate operators are about twenty launches. Several blocks read the scores of a row. The last
// block puts their choices together, with a warp for each row.
#include "kernels.h"
#include "vector.cuh"

namespace kfc {
namespace {

constexpr int kThreadsOfChoice = 1024;
constexpr int kWarpsOfChoice = kThreadsOfChoice / 32;

template <class A>
struct Choice {
  A score;
  int64_t word;
};

// NaN is larger than all; of equal scores the first word is taken.
template <class A>
__device__ __forceinline__ bool is_before(const Choice<A>& one, const Choice<A>& other) {
  const bool one_nan = one.score != one.score;
  const bool other_nan = other.score != other.score;
  if (one_nan != other_nan) return one_nan;
  if (one_nan || one.score == other.score) return one.word < other.word;
  return one.score > other.score;
}

template <class A>
__device__ __forceinline__ void take_better(Choice<A>& best, const Choice<A>& other) {
  if (is_before(other, best)) best = other;
}

template <class A>
__device__ __forceinline__ Choice<A> best_of_warp(Choice<A> best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const Choice<A> other{__shfl_xor_sync(0xffffffffu, best.score, offset),
                          __shfl_xor_sync(0xffffffffu, best.word, offset)};
    take_better(best, other);
  }
  return best;
}

// Returns the best of the words `first`, `first + step` and so on. Units are packs of words.
template <class T, int N, class A>
__device__ __forceinline__ Choice<A> best_of_words(const NextToken& a, int64_t row, int64_t first, int64_t step) {
  const T* scores = static_cast<const T*>(a.scores) + row * a.score_stride;
  const bool* held_back = a.held_back != nullptr && *a.length < *a.least ? a.held_back : nullptr;
  Choice<A> best{-INFINITY, INT64_MAX};
  const auto look = [&](T score, int64_t word) {
    const bool holds = held_back != nullptr && held_back[word];
    take_better(best, {holds ? A(-INFINITY) : static_cast<A>(widen(score)), word});
  };
  const int64_t packs = a.words / N;
#pragma unroll 4
  for (int64_t pack = first; pack < packs; pack += step) {
    alignas(N * sizeof(T)) T several[N];
    if constexpr (N == 1) {
      several[0] = scores[pack];
    } else {
      *reinterpret_cast<uint4*>(several) = reinterpret_cast<const uint4*>(scores)[pack];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) look(several[j], pack * N + j);
  }
  const int64_t rest = packs * N + first;
  if (rest < a.words) look(scores[rest], rest);
  return best;
}

template <class T, int N>
__global__ void __launch_bounds__(kThreadsOfChoice) next_token_kernel(const __grid_constant__ NextToken a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ Choice<A> found[kWarpsOfChoice];
  __shared__ bool is_last;
  const int warp = threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const auto parts = static_cast<int>(gridDim.y);
  A* scores = reinterpret_cast<A*>(a.scratch);  // each takes the memory of an integer
  int64_t* words = a.scratch + a.rows * parts;
  constexpr int kApart = sizeof(int64_t) / sizeof(A);

  Choice<A> best = best_of_words<T, N, A>(a, blockIdx.x, blockIdx.y * kThreadsOfChoice + threadIdx.x,
                                          static_cast<int64_t>(parts) * kThreadsOfChoice);
  best = best_of_warp(best);
  if (lane == 0) found[warp] = best;
  __syncthreads();
  if (warp == 0) {
    best = best_of_warp(found[lane]);
    if (lane == 0) {
      const int64_t at = static_cast<int64_t>(blockIdx.x) * parts + blockIdx.y;
      scores[at * kApart] = best.score;
      words[at] = best.word;
      __threadfence();
      auto* done = reinterpret_cast<unsigned long long*>(a.scratch + 2 * a.rows * a.parts);
      is_last = atomicAdd(done, 1ull) == static_cast<unsigned long long>(a.rows * parts - 1);
      __threadfence();
    }
  }
  __syncthreads();
  if (!is_last) return;

  const int64_t length = *a.length;
  const bool ends = a.ends != nullptr;
  bool all_finished = true;
  for (int64_t r = warp; r < a.rows; r += kWarpsOfChoice) {
    best = {-INFINITY, INT64_MAX};
    for (int part = lane; part < parts; part += 32) {
      const int64_t at = r * parts + part;
      take_better(best, {__ldcg(scores + at * kApart), __ldcg(reinterpret_cast<const long long*>(words + at))});
    }
    best = best_of_warp(best);
    if (lane != 0) continue;
    const bool finished = a.finished[r];
    const int64_t token = ends && finished ? a.pad : best.word;
    if (length >= 0 && length < a.width) a.sequences[r * a.width + length] = token;
    a.inputs[r] = token;
    if (a.position_ids != nullptr) a.position_ids[r] += 1;
    bool is_end = false;
    for (int64_t i = 0; i < a.end_count; ++i) is_end |= token == a.ends[i];
    if (is_end) a.finished[r] = true;
    all_finished &= finished;
  }
  all_finished = __syncthreads_and(all_finished);
  if (threadIdx.x == 0) {
    if (!ends || !all_finished) *a.length = length + 1;
    *a.position += 1;
    a.scratch[2 * a.rows * a.parts] = 0;
  }
}

static_assert(kWarpsOfChoice == 32, "one warp puts the choices of all warps together");

template <class T>
void launch(const NextToken& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const bool aligned =
      reinterpret_cast<uintptr_t>(a.scores) % kPackBytes == 0 && (a.rows == 1 || a.score_stride % N == 0);
  // Each thread reads one pack, if there are enough parts.
  const int64_t filled = blocks_of(a.words, (aligned ? N : 1) * static_cast<int64_t>(kThreadsOfChoice));
  const dim3 blocks(static_cast<unsigned>(a.rows), static_cast<unsigned>(filled < a.parts ? filled : a.parts));
  if (aligned) {
    launch_overlapped(next_token_kernel<T, N>, blocks, kThreadsOfChoice, stream, a);
  } else {
    launch_overlapped(next_token_kernel<T, 1>, blocks, kThreadsOfChoice, stream, a);
  }
}

}  // namespace

int launch_next_token(const NextToken& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
