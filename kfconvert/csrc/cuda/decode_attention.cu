// One step of attention over a cache of keys and values (flash decoding, Dao et al. 2023): RMS norms and rotation of q
// and k, the writes to the cache, scores, softmax and weighted sum in one launch
//   q, y: (batch, heads, size);  keys, values: (batch, heads / sharing, capacity, size)
//
// Limited by memory bandwidth, for short caches by latency. A block takes HEADS heads of queries that share one of
// keys, and reads its keys and values once for all of them, 16 bytes a lane; places that the mask hides are not read.
// LANES neighbouring lanes take a place. Each has running sums, which are put together at the end.
#include "kernels.h"
#include "vector.cuh"

namespace kfc {
namespace {

constexpr int kThreadsOfStep = 256;
constexpr int kWarpsOfStep = kThreadsOfStep / 32;
// A part has so many places at least.
constexpr int64_t kLeastPlaces = 192;

// Sums over places: of exp(score - top) times value, and of exp(score - top).
template <class A, int N>
struct Sums {
  A values[N] = {};
  A weight = 0;
  A top = -INFINITY;
};

// What sums relative to `top` are multiplied by to be relative to `higher`. Without this test, two infinities would
// make a NaN.
template <class M, class A>
__device__ __forceinline__ A rescaled(A top, A higher) {
  return top == higher ? A(1) : M::exp(top - higher);
}

// Makes the sums relative to a top that is as high or higher.
template <class M, class A, int N>
__device__ __forceinline__ void raise_top(Sums<A, N>& sums, A top) {
  const A kept = rescaled<M>(sums.top, top);
  sums.top = top;
  sums.weight *= kept;
#pragma unroll
  for (int j = 0; j < N; ++j) sums.values[j] *= kept;
}

// Of a score that is not above the top. A NaN is never the largest; it comes through as a weight.
template <class M, class A, int N>
__device__ __forceinline__ void add_place(Sums<A, N>& to, A score, const A (&value)[N]) {
  const A weight = score == -INFINITY ? A(0) : M::exp(score - to.top);
  to.weight += weight;
#pragma unroll
  for (int j = 0; j < N; ++j) to.values[j] += weight * value[j];
}

// Puts the sums of lanes that lie `offset` apart together.
template <class M, class A, int N>
__device__ __forceinline__ void join_lanes(Sums<A, N>& sums, int offset) {
  const A other_top = __shfl_xor_sync(0xffffffffu, sums.top, offset);
  const A other_weight = __shfl_xor_sync(0xffffffffu, sums.weight, offset);
  const A top = other_top > sums.top ? other_top : sums.top;
  const A own = rescaled<M>(sums.top, top);
  const A others = rescaled<M>(other_top, top);
  sums.top = top;
  sums.weight = sums.weight * own + other_weight * others;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const A other = __shfl_xor_sync(0xffffffffu, sums.values[j], offset);
    sums.values[j] = sums.values[j] * own + other * others;
  }
}

// The mask of one batch and head.
template <class T>
struct StepMask {
  const void* data;
  int64_t stride;
  bool boolean;

  __device__ StepMask(const DecodeAttention& a, int64_t batch, int64_t head)
      : data(a.mask), stride(a.mask_strides[2]), boolean(a.boolean) {
    if (data == nullptr) return;
    const int64_t at = batch * a.mask_strides[0] + head * a.mask_strides[1];
    data = boolean ? static_cast<const void*>(static_cast<const bool*>(data) + at)
                   : static_cast<const void*>(static_cast<const T*>(data) + at);
  }

  // What is added to the score of a place.
  template <class A>
  __device__ __forceinline__ A at(int64_t place) const {
    if (data == nullptr) return 0;
    if (boolean) return static_cast<const bool*>(data)[place * stride] ? A(0) : A(-INFINITY);
    return static_cast<A>(widen(static_cast<const T*>(data)[place * stride]));
  }
};

// Requests the first filled places from `begin` on. Each thread requests a line of keys and a line of values.
// `position` may be that of the step before.
template <class T>
__device__ __forceinline__ void prefetch_places(const DecodeAttention& a, const T* keys, const T* values, int64_t begin,
                                                int64_t end, int64_t position) {
  constexpr int kLine = 128 / sizeof(T);
  const int lines = (static_cast<int>(a.size) + kLine - 1) / kLine;
  const int64_t place = begin + threadIdx.x / lines;
  const int col = threadIdx.x % lines * kLine;
  if (place >= end || place >= position) return;
  prefetch(keys + place * a.key_strides[2] + col);
  prefetch(values + place * a.value_strides[2] + col);
}

// STEPS: so many places of a lane are loaded before the first is used.
template <class T, int LANES, int HEADS, int STEPS, int THREADS>
__global__ void __launch_bounds__(THREADS, THREADS == kThreadsOfStep && HEADS < 8 ? 2 : 1)
    decode_attention_kernel(const __grid_constant__ DecodeAttention a) {
  start_next_kernel();
  using A = typename Accumulate<T>::type;
  using M = typename MathFor<T>::type;
  constexpr int N = kPackBytes / sizeof(T);
  constexpr int kWidth = LANES * N;
  constexpr int kWarps = THREADS / 32;
  constexpr int kPlaces = THREADS / LANES;                             // at a time
  constexpr int kRows = 1 + HEADS;                                     // k and the queries
  constexpr int kElements = (kRows * kWidth + THREADS - 1) / THREADS;  // of these rows, for a thread
  constexpr int kGroup = kWidth < 32 ? kWidth : 32;
  __shared__ A rows[kRows * kWidth];  // times the weights of their norms
  __shared__ A squares[kRows * kWidth / kGroup];
  __shared__ A queries[HEADS][kWidth];
  __shared__ alignas(kPackBytes) T new_key[kWidth];
  __shared__ alignas(kPackBytes) T new_value[kWidth];
  __shared__ A tops[kWarps][HEADS];
  __shared__ A weights[kWarps][HEADS];
  __shared__ A values[kWarps][HEADS][kWidth];

  const int groups = static_cast<int>((a.sharing + HEADS - 1) / HEADS);
  const int group = blockIdx.x % groups;
  const int64_t key_heads = a.heads / a.sharing;
  const int64_t key_head = blockIdx.x / groups % key_heads;
  const int64_t batch = blockIdx.x / groups / key_heads;
  const int64_t first_head = key_head * a.sharing + group * HEADS;
  const int heads = static_cast<int>(a.sharing - group * HEADS < HEADS ? a.sharing - group * HEADS : HEADS);
  const T* cos = a.cos == nullptr ? nullptr : static_cast<const T*>(a.cos) + batch * a.cos_stride;
  const T* sin = a.sin == nullptr ? nullptr : static_cast<const T*>(a.sin) + batch * a.sin_stride;
  T* keys = static_cast<T*>(a.keys) + batch * a.key_strides[0] + key_head * a.key_strides[1];
  T* cached = static_cast<T*>(a.values) + batch * a.value_strides[0] + key_head * a.value_strides[1];
  const int64_t part = (a.capacity + a.parts - 1) / a.parts;
  const int64_t begin = blockIdx.y * part;
  const int64_t end = begin + part < a.capacity ? begin + part : a.capacity;
  // This may be the position of the step before. It only decides what the block requests early.
  const int64_t filled = __ldcg(reinterpret_cast<const long long*>(a.position));
  prefetch_places(a, keys, cached, begin, end, filled);
  wait_for_previous_kernel();

  // The places of an iteration, up to `known`. Heads beyond the last use the mask of the last.
  using P = Pack<T, N>;
  const int col = threadIdx.x % LANES * N;
  const bool own_masks = a.mask_strides[1] != 0;
  A added[STEPS][HEADS];
  Word<P> key[STEPS];
  Word<P> value[STEPS];
  const auto place_of = [&](int64_t first, int step) { return first + step * kPlaces + threadIdx.x / LANES; };
  const auto load = [&](int step, int64_t place) {
    key[step] = load_word<P>(keys + place * a.key_strides[2] + col);
    value[step] = load_word<P>(cached + place * a.value_strides[2] + col);
  };
  const auto load_places = [&](int64_t first, int64_t known) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int64_t place = place_of(first, step);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        if (h == 0 || own_masks) {
          const int64_t head = first_head + (h < heads ? h : heads - 1);
          added[step][h] = place < end ? StepMask<T>(a, batch, head).template at<A>(place) : A(-INFINITY);
        } else {
          added[step][h] = added[step][0];
        }
      }
      // What is filled comes at once, whether or not the mask will show it.
      key[step] = value[step] = Word<P>{};
      if (place < end && place <= known && col < a.size) load(step, place);
    }
  };

  // Loads of k, v, the queries, the angles and the first places of the cache overlap. With many heads, places would
  // need too many registers, and each block has more to do.
  constexpr bool kEarly = HEADS <= 2;
  if (kEarly) load_places(begin, filled);
  const int64_t position = *a.position;
  const T* k = static_cast<const T*>(a.k) + batch * a.k_strides[0] + key_head * a.k_strides[1];
  const T* q = static_cast<const T*>(a.q) + batch * a.q_strides[0] + first_head * a.q_strides[1];
  const T* v = static_cast<const T*>(a.v) + batch * a.v_strides[0] + key_head * a.v_strides[1];
  const bool has_norms = a.q_norm != nullptr;
  const T v_of_thread = threadIdx.x < a.size ? v[threadIdx.x] : T(0.0f);
  A cosine[kElements];
  A sine[kElements];
#pragma unroll
  for (int n = 0; n < kElements; ++n) {
    const int i = threadIdx.x + n * THREADS;
    const int row = i / kWidth;
    const int at = i % kWidth;
    const bool inside = row <= heads && at < a.size;
    const bool turns = inside && cos != nullptr;
    const T* from = row == 0 ? k : q + (row - 1) * a.q_strides[1];
    const T* norm = static_cast<const T*>(row == 0 ? a.k_norm : a.q_norm);
    const A x = inside ? static_cast<A>(widen(from[at])) : A(0);
    const A factor = inside && has_norms ? static_cast<A>(a.offset) + static_cast<A>(widen(norm[at])) : A(1);
    cosine[n] = turns ? static_cast<A>(widen(cos[at])) : A(1);
    sine[n] = turns ? static_cast<A>(widen(sin[at])) : A(0);
    if (i < kRows * kWidth) rows[i] = x * factor;
    if (has_norms) {
      A square[1] = {x * x};
      lane_sums<kGroup>(square);
      if (i < kRows * kWidth && i % kGroup == 0) squares[i / kGroup] = square[0];
    }
  }
  __syncthreads();

  // Every block has the key and the value of the step at hand, and one of them puts them into the cache. A place that
  // the cache does not have is not written to.
  const bool writes = group == 0 && blockIdx.y == 0 && position >= 0 && position < a.capacity;
#pragma unroll
  for (int n = 0; n < kElements; ++n) {
    const int i = threadIdx.x + n * THREADS;
    const int row = i / kWidth;
    const int at = i % kWidth;
    if (i >= kRows * kWidth) break;
    A x = rows[i];
    if (cos != nullptr && at < a.size) {
      const int half = static_cast<int>(a.size / 2);
      x = x * cosine[n] + (at < half ? -rows[i + half] : rows[i - half]) * sine[n];
    }
    if (has_norms) {
      A square = 0;
#pragma unroll
      for (int j = 0; j < kWidth / kGroup; ++j) square += squares[row * (kWidth / kGroup) + j];
      x *= rsqrt(square / static_cast<A>(a.size) + static_cast<A>(a.eps));
    }
    if (row > 0) {
      queries[row - 1][at] = x * static_cast<A>(a.scale);
      continue;
    }
    const T rounded = narrow<T>(x);
    new_key[at] = rounded;
    new_value[at] = v_of_thread;
    if (writes && at < a.size) {
      keys[position * a.key_strides[2] + at] = rounded;
      cached[position * a.value_strides[2] + at] = v_of_thread;
    }
  }
  __syncthreads();

  A query[HEADS][N];
  Sums<A, N> sums[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
#pragma unroll
    for (int j = 0; j < N; ++j) query[h][j] = queries[h][col + j];
  }
  int64_t known = filled;
  for (int64_t first = begin; first < end; first += kPlaces * STEPS) {
    if (!kEarly || first != begin) load_places(first, known = position);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int64_t place = place_of(first, step);
      bool seen = false;
#pragma unroll
      for (int h = 0; h < HEADS; ++h) seen = seen || added[step][h] != -INFINITY;
      if (!seen) {
        key[step] = value[step] = Word<P>{};
      } else if (place == position) {
        key[step] = load_word<P>(new_key + col);
        value[step] = load_word<P>(new_value + col);
      } else if (place > known && col < a.size) {
        load(step, place);
      }
    }
    A scores[STEPS][HEADS] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      A wide[N];
      widen_word<T>(key[step], wide);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
#pragma unroll
        for (int j = 0; j < N; ++j) scores[step][h] += query[h][j] * wide[j];
      }
      lane_sums<LANES>(scores[step]);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) {
        // Of what is not seen the score is that of zeros.
        scores[step][h] = added[step][h] == -INFINITY ? A(-INFINITY) : scores[step][h] + added[step][h];
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      A top = sums[h].top;
#pragma unroll
      for (int step = 0; step < STEPS; ++step) top = scores[step][h] > top ? scores[step][h] : top;
      raise_top<M>(sums[h], top);
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      A wide[N];
      widen_word<T>(value[step], wide);
#pragma unroll
      for (int h = 0; h < HEADS; ++h) add_place<M>(sums[h], scores[step][h], wide);
    }
  }

#pragma unroll
  for (int h = 0; h < HEADS; ++h) {
#pragma unroll
    for (int offset = LANES; offset < 32; offset *= 2) join_lanes<M>(sums[h], offset);
  }
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 < LANES) {
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      if (threadIdx.x % 32 == 0) {
        tops[warp][h] = sums[h].top;
        weights[warp][h] = sums[h].weight;
      }
#pragma unroll
      for (int j = 0; j < N; ++j) values[warp][h][col + j] = sums[h].values[j];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < HEADS * kWidth; i += THREADS) {
    const int head = i / kWidth;
    const int at = i % kWidth;
    if (head >= heads || at >= a.size) continue;
    A top = -INFINITY;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) top = tops[w][head] > top ? tops[w][head] : top;
    A weight = 0;
    A sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const A kept = rescaled<M>(tops[w][head], top);
      weight += weights[w][head] * kept;
      sum += values[w][head][at] * kept;
    }
    const int64_t row = batch * a.heads + first_head + head;
    if (a.parts == 1) {
      // A row that sees nothing is 0, as in PyTorch.
      static_cast<T*>(a.y)[row * a.size + at] = narrow<T>(weight == 0 ? A(0) : sum / weight);
    } else {
      A* partial = static_cast<A*>(a.partials) + (row * a.parts + blockIdx.y) * (a.size + 2);
      partial[at] = sum;
      if (at == 0) {
        partial[a.size] = weight;
        partial[a.size + 1] = top;
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreadsOfStep) join_parts_kernel(const __grid_constant__ DecodeAttention a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  using M = typename MathFor<T>::type;
  const int64_t width = a.size + 2;
  const A* partials = static_cast<const A*>(a.partials) + blockIdx.x * a.parts * width;
  for (int64_t col = threadIdx.x; col < a.size; col += kThreadsOfStep) {
    A top = -INFINITY;
    for (int64_t part = 0; part < a.parts; ++part) {
      const A other = partials[part * width + a.size + 1];
      top = other > top ? other : top;
    }
    A weight = 0;
    A sum = 0;
    for (int64_t part = 0; part < a.parts; ++part) {
      const A* from = partials + part * width;
      const A kept = rescaled<M>(from[a.size + 1], top);
      weight += from[a.size] * kept;
      sum += from[col] * kept;
    }
    static_cast<T*>(a.y)[blockIdx.x * a.size + col] = narrow<T>(weight == 0 ? A(0) : sum / weight);
  }
}

template <class T, int LANES, int HEADS>
void launch_kernel(const DecodeAttention& a, cudaStream_t stream) {
  const int64_t groups = (a.sharing + HEADS - 1) / HEADS;
  const dim3 grid(static_cast<unsigned>(a.batch * (a.heads / a.sharing) * groups), static_cast<unsigned>(a.parts));
  const auto launch_with = [&](auto steps, auto threads) {
    launch_overlapped(decode_attention_kernel<T, LANES, HEADS, steps, threads>, grid, dim3(threads), stream, a);
  };
  using std::integral_constant;
  const int64_t blocks = static_cast<int64_t>(grid.x) * grid.y;
  if constexpr (HEADS == 1 && sizeof(T) < 8) {
    // A block that has a multiprocessor for itself takes more of it; the fewer there are, the sooner memory answers.
    using Wide = integral_constant<int, 2 * kThreadsOfStep>;
    if (2 * blocks <= multiprocessors()) return launch_with(integral_constant<int, 2>{}, Wide{});
    if (blocks <= multiprocessors()) return launch_with(integral_constant<int, 4>{}, Wide{});
  }
  // As many steps as there are registers for.
  constexpr int kSteps = HEADS <= 2 ? 4 : HEADS <= 4 ? 2 : 1;
  launch_with(integral_constant<int, kSteps>{}, integral_constant<int, kThreadsOfStep>{});
}

template <class T, int LANES, int HEADS>
void launch_kernels(const DecodeAttention& a, cudaStream_t stream) {
  launch_kernel<T, LANES, HEADS>(a, stream);
  if (a.parts > 1) {
    launch_overlapped(join_parts_kernel<T>, static_cast<unsigned>(a.batch * a.heads), kThreadsOfStep, stream, a);
  }
}

// Few blocks take as few heads as fill the device, so that each has less to do.
int64_t heads_of_block(const DecodeAttention& a) {
  int64_t heads = 1;
  while (2 * heads <= a.sharing && a.batch * a.heads / (2 * heads) >= multiprocessors()) heads *= 2;
  return heads;
}

template <class T, int LANES>
void launch_width(const DecodeAttention& a, cudaStream_t stream) {
  // float64 is a reference type: one kernel is enough.
  if constexpr (sizeof(T) < 8) {
    const int64_t heads = heads_of_block(a);
    // Eight heads of the widest rows would need too much shared memory.
    if constexpr (LANES * sizeof(float) * kPackBytes / sizeof(T) * kWarpsOfStep * 8 <= 32 * 1024) {
      if (heads >= 8) return launch_kernels<T, LANES, 8>(a, stream);
    }
    if (heads >= 4) return launch_kernels<T, LANES, 4>(a, stream);
    if (heads >= 2) return launch_kernels<T, LANES, 2>(a, stream);
  }
  launch_kernels<T, LANES, 1>(a, stream);
}

template <class T>
void launch(const DecodeAttention& a, cudaStream_t stream) {
  const int64_t bytes = a.size * static_cast<int64_t>(sizeof(T));
  if (bytes <= 8 * kPackBytes) return launch_width<T, 8>(a, stream);
  if (bytes <= 16 * kPackBytes) return launch_width<T, 16>(a, stream);
  launch_width<T, 32>(a, stream);
}

}  // namespace

int64_t decode_parts(const DecodeAttention& a) {
  const int64_t blocks = a.batch * a.heads / (a.dtype == DType::f64 ? 1 : heads_of_block(a));
  const int64_t fill = 2 * multiprocessors() / (blocks > 0 ? blocks : 1);
  const int64_t most = a.capacity / kLeastPlaces;
  const int64_t parts = fill < most ? fill : most;
  return parts > 1 ? parts : 1;
}

int launch_decode_attention(const DecodeAttention& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
