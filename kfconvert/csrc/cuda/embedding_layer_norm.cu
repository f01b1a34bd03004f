// s = word[ids] + position[n] + token_type[token_type_ids]
// y = (s - mean) / sqrt(mean((s - mean)^2) + eps) * weight + bias
//   word, position, token_type: (words / positions / token_types, cols);  ids, token_type_ids: (rows);  y: (rows, cols)
//
// Limited by memory bandwidth: a row of each table is read once, s stays in registers as in layer_norm_forward.cu. Rows
// that do not fit are read four times, mostly from L2.
#include <cassert>

#include "kernels.h"
#include "norm_rows.cuh"

namespace kfc {
namespace {

// Where the addends of a row begin.
template <class T>
struct Addends {
  const T* word;
  const T* position;
  const T* token_type;
};

__device__ __forceinline__ int64_t checked_id(const RowIds& ids, int64_t row) {
  if (ids.data == nullptr) return 0;
  const void* data = ids.data;
  const int64_t id = ids.narrow ? static_cast<const int32_t*>(data)[row] : static_cast<const int64_t*>(data)[row];
  assert(id >= 0 && id < ids.count && "embedding_layer_norm: an id is out of range");
  return id;
}

template <class T>
__device__ __forceinline__ Addends<T> addends_of(const EmbeddingLayerNorm& a, int64_t row) {
  const int64_t cols = a.norm.cols;
  // A division of 64-bit integers costs as much as a small row.
  const int64_t place =
      a.norm.rows <= UINT32_MAX ? static_cast<uint32_t>(row) % static_cast<uint32_t>(a.positions) : row % a.positions;
  const int64_t type = checked_id(a.token_type_ids, row);
  return {static_cast<const T*>(a.word) + checked_id(a.ids, row) * cols,
          static_cast<const T*>(a.position) + place * cols, static_cast<const T*>(a.token_type) + type * cols};
}

// THREADS threads hold a row of at most THREADS * ITEMS packs of N elements.
template <class T, int N, int THREADS, int ITEMS, bool EARLY>
__global__ void __launch_bounds__(row_block(THREADS), kNormBlocks<THREADS, EARLY>)
    embedding_layer_norm_kernel(EmbeddingLayerNorm a, NormScalarsOf<T> norm) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[kMomentValues];
  const int64_t cols = a.norm.cols;
  const RowAffine<true, T, N, THREADS, ITEMS, EARLY> affine(a.norm, norm);
  for_rows<THREADS>(a.norm.rows, [&](int64_t row, bool active) {
    const Addends<T> from = active ? addends_of<T>(a, row) : Addends<T>{};
    RowWords<T, N, ITEMS> word;
    RowWords<T, N, ITEMS> token_type;
    RowWords<T, N, ITEMS> position;
    word.template load<THREADS>(from.word, cols, active);
    token_type.template load<THREADS>(from.token_type, cols, active);
    position.template load<THREADS>(from.position, cols, active);
    A s[ITEMS][N];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      word.get(i, s[i]);
      token_type.add_to(i, s[i]);
      position.add_to(i, s[i]);
    }
    const RowMoments<A> moments = moments_of<true, THREADS>(s, cols, norm, active, shared);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = (i * THREADS + threadIdx.x % THREADS) * N;
      if (!active || col >= cols) break;
      write_pack<kNone, T>(a.norm, row, col, moments, norm.slope, s[i], [&](A(&v)[N]) { affine.apply(i, v); });
    }
  });
}

// A block a row, of any length.
template <class T, int N, int THREADS>
__global__ void __launch_bounds__(THREADS)
    embedding_layer_norm_long_kernel(EmbeddingLayerNorm a, NormScalarsOf<T> norm) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[32];
  const int64_t cols = a.norm.cols;
  for (int64_t row = blockIdx.x; row < a.norm.rows; row += gridDim.x) {
    const Addends<T> from = addends_of<T>(a, row);
    const auto load_sum = [&](int64_t col, A(&s)[N]) {
      A other[N];
      load<N>(from.word + col, s);
      load<N>(from.token_type + col, other);
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] += other[j];
      load<N>(from.position + col, other);
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] += other[j];
    };
    const RowMoments<A> moments = moments_of_long_row<true, THREADS, N, A>(load_sum, cols, norm, shared);
    A s[N];
    for (int64_t col = static_cast<int64_t>(threadIdx.x) * N; col < cols; col += THREADS * N) {
      load_sum(col, s);
      write_pack<kNone, T>(a.norm, row, col, moments, norm.slope, s,
                           [&](A(&v)[N]) { apply_affine<T>(a.norm, col, v); });
    }
  }
}

template <class T, int N, int THREADS>
void launch_long(const EmbeddingLayerNorm& a, cudaStream_t stream) {
  launch_overlapped(embedding_layer_norm_long_kernel<T, N, THREADS>, row_grid(a.norm.rows, 1, THREADS), THREADS, stream,
                    a, NormScalarsOf<T>(a.norm));
}

template <class T>
void launch(const EmbeddingLayerNorm& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const LayerNorm& norm = a.norm;
  const bool packed = norm.cols % N == 0 && aligned(a.word) && aligned(a.position) && aligned(a.token_type) &&
                      aligned(norm.y) && aligned(norm.weight) && aligned(norm.bias);
  if (!packed) return launch_long<T, 1, 256>(a, stream);
  // Reference types and rare ones: one kernel is enough.
  if (sizeof(T) == 8 || !has_own_affine<T>(norm)) return launch_long<T, N, 256>(a, stream);
  if constexpr (sizeof(T) < 8) {
    dispatch_rows<N>(
        norm.cols / N, norm.rows,
        [&](auto shape) {
          constexpr int kThreads = shape.threads;
          constexpr int kBlock = row_block(kThreads);
          launch_overlapped(embedding_layer_norm_kernel<T, N, kThreads, shape.items, shape.early>,
                            row_grid(norm.rows, kBlock / kThreads, kBlock), kBlock, stream, a, NormScalarsOf<T>(norm));
        },
        [&] { launch_long<T, N, 1024>(a, stream); });
  }
}

}  // namespace

int launch_embedding_layer_norm(const EmbeddingLayerNorm& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.norm.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
