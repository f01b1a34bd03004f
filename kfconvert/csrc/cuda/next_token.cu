// A step of generation after its scores: the token with the largest one of each row, put where the next step takes it
// up, with all that is counted on
//   token[r] = argmax(scores[r, :]);  sequences[r, length] = inputs[r] = token[r]
//
// Limited by latency: in separate operators it is some twenty launches. A block reads the scores of a row; the last
// block to be done does what concerns all rows.
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

template <class T, int N>
__global__ void __launch_bounds__(kThreadsOfChoice) next_token_kernel(const __grid_constant__ NextToken a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ Choice<A> found[kWarpsOfChoice];
  __shared__ bool is_last;
  const int64_t row = blockIdx.x;
  const T* scores = static_cast<const T*>(a.scores) + row * a.score_stride;
  const bool* held_back = a.held_back != nullptr && *a.length < *a.least ? a.held_back : nullptr;

  Choice<A> best{-INFINITY, INT64_MAX};
  const auto look = [&](T score, int64_t word) {
    const bool holds = held_back != nullptr && held_back[word];
    take_better(best, {holds ? A(-INFINITY) : static_cast<A>(widen(score)), word});
  };
  const int64_t packs = a.words / N;
#pragma unroll 4
  for (int64_t pack = threadIdx.x; pack < packs; pack += kThreadsOfChoice) {
    alignas(N * sizeof(T)) T several[N];
    if constexpr (N == 1) {
      several[0] = scores[pack];
    } else {
      *reinterpret_cast<uint4*>(several) = reinterpret_cast<const uint4*>(scores)[pack];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) look(several[j], pack * N + j);
  }
  const int64_t rest = packs * N + threadIdx.x;
  if (rest < a.words) look(scores[rest], rest);

  best = best_of_warp(best);
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x < 32) {
    best = best_of_warp(found[threadIdx.x]);
    if (threadIdx.x == 0) {
      a.scratch[row] = best.word;
      __threadfence();
      auto* done = reinterpret_cast<unsigned long long*>(a.scratch + a.rows);
      is_last = atomicAdd(done, 1ull) == static_cast<unsigned long long>(a.rows - 1);
      __threadfence();
    }
  }
  __syncthreads();
  if (!is_last) return;

  const int64_t length = *a.length;
  const bool ends = a.ends != nullptr;
  bool all_finished = true;
  for (int64_t r = threadIdx.x; r < a.rows; r += kThreadsOfChoice) {
    const bool finished = a.finished[r];
    const int64_t token = ends && finished ? a.pad : __ldcg(reinterpret_cast<const long long*>(a.scratch + r));
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
    a.scratch[a.rows] = 0;
  }
}

static_assert(kWarpsOfChoice == 32, "one warp puts the choices of all warps together");

template <class T>
void launch(const NextToken& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const bool aligned =
      reinterpret_cast<uintptr_t>(a.scores) % kPackBytes == 0 && (a.rows == 1 || a.score_stride % N == 0);
  const auto blocks = static_cast<unsigned>(a.rows);
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
