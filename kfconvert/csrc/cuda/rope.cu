// y = x * cos + rotated(x) * sin, rotated (a, b) -> (-b, a), or transposed y = x * cos - rotated(x * sin)
//   x, y: rows of 2 half columns, pairs half columns apart or neighbours;  cos, sin: the same, repeated over rows
//
// Limited by memory bandwidth: x is read once and y written once, 16 bytes a thread and access; cos and sin, which the
// heads and the batch share, come from the cache, and once for several heads.
#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

// N columns and the N that they are paired with. A choice at run time would make each load wait for the one before it.
template <bool INTERLEAVED, int N, class T, class A>
__device__ __forceinline__ void load_pairs(const T* row, int64_t col, int64_t half, A (&first)[N], A (&second)[N]) {
  if constexpr (INTERLEAVED) {
    A both[2][N];
    load<N>(row + 2 * col, both[0]);
    load<N>(row + 2 * col + N, both[1]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      first[j] = both[2 * j / N][2 * j % N];
      second[j] = both[(2 * j + 1) / N][(2 * j + 1) % N];
    }
  } else {
    load<N>(row + col, first);
    load<N>(row + half + col, second);
  }
}

template <bool INTERLEAVED, int N, class T, class A>
__device__ __forceinline__ void store_pairs(T* row, int64_t col, int64_t half, const A (&first)[N],
                                            const A (&second)[N]) {
  if constexpr (INTERLEAVED) {
    A both[2][N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      both[2 * j / N][2 * j % N] = first[j];
      both[(2 * j + 1) / N][(2 * j + 1) % N] = second[j];
    }
    store<N>(row + 2 * col, both[0]);
    store<N>(row + 2 * col + N, both[1]);
  } else {
    store<N>(row + col, first);
    store<N>(row + half + col, second);
  }
}

// Rows that a thread computes with the same cos and sin. More leave too few threads for small tensors.
constexpr int kSteps = 4;

// How far they lie apart; the sizes of Rope count them as one.
struct Shared {
  int64_t y_stride;
  int64_t x_stride;
};

template <bool INTERLEAVED, class T, int N, int STEPS, class Index, class Divider>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(const __grid_constant__ Rope a, const __grid_constant__ Dividers<Divider> sizes,
                const __grid_constant__ Divider packs, Shared shared) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  const Index count = static_cast<Index>(a.rows * (a.half / N));
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const Index row = packs.divide(i);
    const int64_t col = static_cast<int64_t>(i - row * packs.divisor) * N;
    T* y = static_cast<T*>(a.y);
    const T* from = static_cast<const T*>(a.x);
    const T* of_cos = static_cast<const T*>(a.cos);
    const T* of_sin = static_cast<const T*>(a.sin);
    for_dimensions(row, a.dims, sizes, [&](int dim, int64_t here) {
      y += here * a.y_strides[dim];
      from += here * a.x_strides[dim];
      of_cos += here * a.cos_strides[dim];
      of_sin += here * a.sin_strides[dim];
    });
    A cos[2][N];
    A sin[2][N];
    A x[STEPS][2][N];
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
      load_pairs<INTERLEAVED, N>(from + k * shared.x_stride, col, a.half, x[k][0], x[k][1]);
    }
    load_pairs<INTERLEAVED, N>(of_cos, col, a.half, cos[0], cos[1]);
    load_pairs<INTERLEAVED, N>(of_sin, col, a.half, sin[0], sin[1]);
    // Of the transposed form the sines change places and signs.
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A first = sin[0][j];
      const A second = sin[1][j];
      sin[0][j] = a.transposed ? second : -first;
      sin[1][j] = a.transposed ? -first : second;
    }
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const A first = x[k][0][j];
        const A second = x[k][1][j];
        x[k][0][j] = first * cos[0][j] + second * sin[0][j];
        x[k][1][j] = second * cos[1][j] + first * sin[1][j];
      }
      store_pairs<INTERLEAVED, N>(y + k * shared.y_stride, col, a.half, x[k][0], x[k][1]);
    }
  }
}

template <class T, int N, int STEPS, class Index, class Divider>
void launch_kernel(const Rope& a, const Shared& shared, cudaStream_t stream) {
  const auto kernel =
      a.interleaved ? rope_kernel<true, T, N, STEPS, Index, Divider> : rope_kernel<false, T, N, STEPS, Index, Divider>;
  launch_overlapped(kernel, elementwise_grid(a.rows * (a.half / N)), kThreads, stream, a,
                    Dividers<Divider>(a.sizes, a.dims), Divider(a.half / N), shared);
}

// Takes STEPS neighbours along a dimension in which cos and sin are repeated as one; false where there is none.
template <int STEPS>
bool share(Rope& a, Shared& shared) {
  for (int dim = a.dims - 1; dim >= 0; --dim) {
    if (a.cos_strides[dim] != 0 || a.sin_strides[dim] != 0 || a.sizes[dim] % STEPS != 0) continue;
    shared = {a.y_strides[dim], a.x_strides[dim]};
    a.sizes[dim] /= STEPS;
    a.rows /= STEPS;
    a.y_strides[dim] *= STEPS;
    a.x_strides[dim] *= STEPS;
    return true;
  }
  return false;
}

template <class T>
void launch(const Rope& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const bool small = 2 * a.rows * a.half <= kMostElements;
  // float64 is a reference type: one kernel is enough.
  if constexpr (sizeof(T) < 8) {
    bool packed = small && a.half % N == 0 && aligned(a.x) && aligned(a.y) && aligned(a.cos) && aligned(a.sin);
    for (int i = 0; i < a.dims; ++i) {
      for (const int64_t* strides : {a.y_strides, a.x_strides, a.cos_strides, a.sin_strides}) {
        packed = packed && strides[i] % N == 0;
      }
    }
    if (packed) {
      Rope shorter = a;
      Shared shared{};
      if (share<kSteps>(shorter, shared)) {
        return launch_kernel<T, N, kSteps, uint32_t, Divider32>(shorter, shared, stream);
      }
      return launch_kernel<T, N, 1, uint32_t, Divider32>(a, {}, stream);
    }
  }
  if (small) return launch_kernel<T, 1, 1, uint32_t, Divider32>(a, {}, stream);
  launch_kernel<T, 1, 1, uint64_t, Divider64>(a, {}, stream);
}

}  // namespace

int launch_rope(const Rope& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
