// y = x * cos + rotated(x) * sin, rotated (a, b) -> (-b, a), or transposed y = x * cos - rotated(x * sin)
//   x, y: rows of 2 half columns, pairs half columns apart or neighbours;  cos, sin: the same, repeated over rows
//
// Limited by memory bandwidth: x is read once and y written once, 16 bytes a thread and access; cos and sin, which the
// heads and the batch share, come from the cache.
#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

// N columns and the N that they are paired with.
template <int N, class T, class A>
__device__ __forceinline__ void load_pairs(const T* row, int64_t col, const Rope& a, A (&first)[N], A (&second)[N]) {
  if (a.interleaved) {
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
    load<N>(row + a.half + col, second);
  }
}

template <int N, class T, class A>
__device__ __forceinline__ void store_pairs(T* row, int64_t col, const Rope& a, const A (&first)[N],
                                            const A (&second)[N]) {
  if (a.interleaved) {
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
    store<N>(row + a.half + col, second);
  }
}

// The divisors of all dimensions but the outermost, and the packs of half a row.
template <class Divider>
struct Dividers {
  Divider packs;
  Divider of[kMostDims - 1];
};

template <class T, int N, class Index, class Divider>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ Rope a,
                                                        const __grid_constant__ Dividers<Divider> by) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  const Index count = static_cast<Index>(a.rows * (a.half / N));
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    Index rest = by.packs.divide(i);
    const int64_t col = static_cast<int64_t>(i - rest * by.packs.divisor) * N;
    int64_t of_y = 0;
    int64_t of_x = 0;
    int64_t of_cos = 0;
    int64_t of_sin = 0;
    const auto move = [&](int dim, int64_t here) {
      of_y += here * a.y_strides[dim];
      of_x += here * a.x_strides[dim];
      of_cos += here * a.cos_strides[dim];
      of_sin += here * a.sin_strides[dim];
    };
#pragma unroll
    for (int dim = kMostDims - 1; dim > 0; --dim) {
      if (dim >= a.dims) continue;
      const Index outer = by.of[dim - 1].divide(rest);
      move(dim, rest - outer * by.of[dim - 1].divisor);
      rest = outer;
    }
    move(0, rest);
    A x[2][N];
    A cos[2][N];
    A sin[2][N];
    load_pairs<N>(static_cast<const T*>(a.x) + of_x, col, a, x[0], x[1]);
    load_pairs<N>(static_cast<const T*>(a.cos) + of_cos, col, a, cos[0], cos[1]);
    load_pairs<N>(static_cast<const T*>(a.sin) + of_sin, col, a, sin[0], sin[1]);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const A first = x[0][j];
      const A second = x[1][j];
      if (a.transposed) {
        x[0][j] = first * cos[0][j] + second * sin[1][j];
        x[1][j] = second * cos[1][j] - first * sin[0][j];
      } else {
        x[0][j] = first * cos[0][j] - second * sin[0][j];
        x[1][j] = second * cos[1][j] + first * sin[1][j];
      }
    }
    store_pairs<N>(static_cast<T*>(a.y) + of_y, col, a, x[0], x[1]);
  }
}

template <class T, int N, class Index, class Divider>
void launch_kernel(const Rope& a, cudaStream_t stream) {
  const auto size = [&](int dim) { return Divider(dim < a.dims ? a.sizes[dim] : 1); };
  static_assert(kMostDims == 5, "one divider for each dimension but the first");
  const Dividers<Divider> by{Divider(a.half / N), {size(1), size(2), size(3), size(4)}};
  launch_overlapped(rope_kernel<T, N, Index, Divider>, elementwise_grid(a.rows * (a.half / N)), kThreads, stream, a,
                    by);
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
    if (packed) return launch_kernel<T, N, uint32_t, Divider32>(a, stream);
  }
  if (small) return launch_kernel<T, 1, uint32_t, Divider32>(a, stream);
  launch_kernel<T, 1, uint64_t, Divider64>(a, stream);
}

}  // namespace

int launch_rope(const Rope& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
