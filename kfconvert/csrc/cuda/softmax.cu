// y = softmax(x * scale + mask), or with grad: y = scale * x * (grad - sum(grad * x)), 0 where a boolean mask is False
//   x, grad, y: (rows, cols);  mask: see RowMask
//
// Limited by memory bandwidth: a row is read once into registers, its largest value and its sum are taken there, and it
// is written once. Rows that do not fit are read twice, mostly from L2.
#include "kernels.h"
#include "rows.cuh"

namespace kfc {
namespace {

// Elements of the row's mask; a row is at most 2^31 elements from its start.
template <class T>
struct MaskRow {
  const void* data;
  bool boolean;
  bool repeated;

  __device__ MaskRow(const RowMask& m, int64_t row) : data(m.data), boolean(m.boolean), repeated(m.inner == 0) {
    if (data == nullptr) return;
    int64_t at = 0;
    for (int i = m.dims - 1; i > 0; --i) {
      const int64_t outer = quotient(row, m.sizes[i]);
      at += (row - outer * m.sizes[i]) * m.strides[i];
      row = outer;
    }
    if (m.dims > 0) at += row * m.strides[0];
    data = boolean ? static_cast<const void*>(static_cast<const bool*>(data) + at)
                   : static_cast<const void*>(static_cast<const T*>(data) + at);
  }

  // A division of 64-bit integers costs as much as a small row.
  static __device__ __forceinline__ int64_t quotient(int64_t n, int64_t by) {
    if ((n | by) >> 32 == 0) return static_cast<uint32_t>(n) / static_cast<uint32_t>(by);
    return n / by;
  }

  // Whether packs of N elements of the mask are aligned to their size.
  template <int N>
  __device__ bool packed() const {
    return !repeated && reinterpret_cast<uintptr_t>(data) % (boolean ? N : N * sizeof(T)) == 0;
  }

  template <int N, class A>
  __device__ void apply(int64_t col, A (&v)[N]) const {
    if (data == nullptr) return;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int64_t at = repeated ? 0 : col + j;
      if (boolean) {
        if (!static_cast<const bool*>(data)[at]) v[j] = -INFINITY;
      } else {
        v[j] += widen(static_cast<const T*>(data)[at]);
      }
    }
  }

  // v = x * scale with the mask, for all packs of a thread. A mask that can be loaded in packs is loaded before the
  // kernel waits for x.
  template <int THREADS, int N, int ITEMS, class A>
  __device__ void scale_and_apply(const RowWords<T, N, ITEMS>& x, A scale, int64_t cols, bool active,
                                  A (&v)[ITEMS][N]) const {
    const auto get_scaled = [&] {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        x.get(i, v[i]);
#pragma unroll
        for (int j = 0; j < N; ++j) v[i][j] *= scale;
      }
    };
    if (data == nullptr) {
      get_scaled();
    } else if (!packed<N>()) {
      get_scaled();
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int col = (i * THREADS + threadIdx.x % THREADS) * N;
        if (active && col < cols) apply(col, v[i]);
      }
    } else if (boolean) {
      RowWords<int8_t, N, ITEMS> words;
      words.template load<THREADS>(static_cast<const int8_t*>(data), cols, active);
      get_scaled();
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        int8_t kept[N];
        words.get(i, kept);
#pragma unroll
        for (int j = 0; j < N; ++j) v[i][j] = kept[j] != 0 ? v[i][j] : A(-INFINITY);
      }
    } else {
      RowWords<T, N, ITEMS> terms;
      terms.template load<THREADS>(static_cast<const T*>(data), cols, active);
      get_scaled();
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) terms.add_to(i, v[i]);
    }
  }

  // Of a boolean mask: a bit for each element of a pack, 1 where it takes part.
  template <int N>
  __device__ uint32_t kept_bits(int64_t col) const {
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (static_cast<const bool*>(data)[repeated ? 0 : col + j]) bits |= 1u << j;
    }
    return bits;
  }

  // The same for all packs of a thread, the first pack in the lowest bits.
  template <int THREADS, int N, int ITEMS>
  __device__ uint32_t kept_row_bits(int64_t cols, bool active) const {
    static_assert(ITEMS * N <= 32);
    uint32_t bits = 0;
    if (packed<N>()) {
      int8_t kept[ITEMS][N];
      load_row<THREADS>(static_cast<const int8_t*>(data), cols, active, kept);
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) bits |= (kept[i][j] != 0 ? 1u : 0u) << (i * N + j);
      }
    } else {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int col = (i * THREADS + threadIdx.x % THREADS) * N;
        if (active && col < cols) bits |= kept_bits<N>(col) << (i * N);
      }
    }
    return bits;
  }
};

template <class T, int N, class A>
__device__ __forceinline__ void load_scaled(const Softmax& a, const MaskRow<T>& mask, int64_t row, int64_t col,
                                            A (&v)[N]) {
  load<N>(static_cast<const T*>(a.x) + row * a.cols + col, v);
  const A scale = static_cast<A>(a.scale);
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] *= scale;
  mask.apply(col, v);
}

// THREADS threads hold a row of at most THREADS * ITEMS packs of N elements.
template <class T, int N, int THREADS, int ITEMS>
__global__ void __launch_bounds__(row_block(THREADS)) softmax_kernel(Softmax a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  using M = typename MathFor<T>::type;
  __shared__ A shared[32];
  const int lane = threadIdx.x % THREADS;
  for_rows<THREADS>(a.rows, [&](int64_t row, bool active) {
    RowWords<T, N, ITEMS> x;
    x.template load<THREADS>(static_cast<const T*>(a.x) + row * a.cols, a.cols, active);
    A v[ITEMS][N];
    MaskRow<T>(a.mask, active ? row : 0)
        .template scale_and_apply<THREADS>(x, static_cast<A>(a.scale), a.cols, active, v);
    A largest = -INFINITY;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (active && (i * THREADS + lane) * N < a.cols) {
#pragma unroll
        for (int j = 0; j < N; ++j) largest = max_of(largest, v[i][j]);
      }
    }
    largest = row_max<THREADS>(largest, shared);
    A total = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      if (active && (i * THREADS + lane) * N < a.cols) {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          v[i][j] = M::exp(v[i][j] - largest);
          total += v[i][j];
        }
      }
    }
    const A inverse = A(1) / row_sum<THREADS>(total, shared);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = (i * THREADS + lane) * N;
      if (active && col < a.cols) {
#pragma unroll
        for (int j = 0; j < N; ++j) v[i][j] *= inverse;
        store<N>(static_cast<T*>(a.y) + row * a.cols + col, v[i]);
      }
    }
  });
}

// A block a row, of any length.
template <class T, int N, int THREADS>
__global__ void __launch_bounds__(THREADS) softmax_long_kernel(Softmax a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  using M = typename MathFor<T>::type;
  __shared__ A shared[32];
  const int64_t start = static_cast<int64_t>(threadIdx.x) * N;
  constexpr int64_t kStep = static_cast<int64_t>(THREADS) * N;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const MaskRow<T> mask(a.mask, row);
    A v[1][N];
    OnlineSum<A, M> online;
    for (int64_t col = start; col < a.cols; col += kStep) {
      load_scaled<T>(a, mask, row, col, v[0]);
      online.add(v);
    }
    A largest;
    const A inverse = A(1) / online.template row_total<THREADS>(largest, shared);
    for (int64_t col = start; col < a.cols; col += kStep) {
      load_scaled<T>(a, mask, row, col, v[0]);
#pragma unroll
      for (int j = 0; j < N; ++j) v[0][j] = M::exp(v[0][j] - largest) * inverse;
      store<N>(static_cast<T*>(a.y) + row * a.cols + col, v[0]);
    }
  }
}

template <class T, int N, class A>
__device__ __forceinline__ A load_pair(const Softmax& a, int64_t at, A (&y)[N], A (&grad)[N]) {
  load<N>(static_cast<const T*>(a.x) + at, y);
  load<N>(static_cast<const T*>(a.grad) + at, grad);
  A total = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) total += y[j] * grad[j];
  return total;
}

// The gradient of an element whose bit in `kept` is 0 is 0, even if y is NaN.
template <class T, int N, class A>
__device__ __forceinline__ void store_gradient(const Softmax& a, int64_t at, A total, const A (&y)[N], A (&grad)[N],
                                               uint32_t kept) {
  const A scale = static_cast<A>(a.scale);
#pragma unroll
  for (int j = 0; j < N; ++j) grad[j] = (kept >> j & 1) != 0 ? scale * y[j] * (grad[j] - total) : A(0);
  store<N>(static_cast<T*>(a.y) + at, grad);
}

// So many threads, rounded down to whole blocks, fit a multiprocessor if each has the registers for its part of two
// rows.
template <int ELEMENTS>
constexpr int kBackwardThreads = ELEMENTS > 24 ? 768 : 1024;

// Calls with a mask have kernels of their own, because finding the row's place in the mask takes registers.
template <class T, int N, int THREADS, int ITEMS, bool masked>
__global__ void __launch_bounds__(row_block(THREADS), kBackwardThreads<ITEMS * N> / row_block(THREADS))
    softmax_backward_kernel(Softmax a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  static_assert(row_block(THREADS) <= kBackwardThreads<ITEMS * N>);
  __shared__ A shared[32];
  const int lane = threadIdx.x % THREADS;
  for_rows<THREADS>(a.rows, [&](int64_t row, bool active) {
    RowWords<T, N, ITEMS> y_row;
    RowWords<T, N, ITEMS> grad_row;
    y_row.template load<THREADS>(static_cast<const T*>(a.x) + row * a.cols, a.cols, active);
    grad_row.template load<THREADS>(static_cast<const T*>(a.grad) + row * a.cols, a.cols, active);
    uint32_t kept = ~0u;
    if constexpr (masked) {
      kept = MaskRow<T>(a.mask, active ? row : 0).template kept_row_bits<THREADS, N, ITEMS>(a.cols, active);
    }
    A y[N];
    A grad[N];
    A total = 0;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      y_row.get(i, y);
      grad_row.get(i, grad);
#pragma unroll
      for (int j = 0; j < N; ++j) total += y[j] * grad[j];
    }
    total = row_sum<THREADS>(total, shared);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int col = (i * THREADS + lane) * N;
      if (!active || col >= a.cols) continue;
      y_row.get(i, y);
      grad_row.get(i, grad);
      store_gradient<T>(a, row * a.cols + col, total, y, grad, kept >> (i * N));
    }
  });
}

template <class T, int N, int THREADS, bool masked>
__global__ void __launch_bounds__(THREADS) softmax_backward_long_kernel(Softmax a) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[32];
  const int64_t start = static_cast<int64_t>(threadIdx.x) * N;
  constexpr int64_t kStep = static_cast<int64_t>(THREADS) * N;
  for (int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    A y[N];
    A grad[N];
    A total = 0;
    for (int64_t col = start; col < a.cols; col += kStep) total += load_pair<T>(a, row * a.cols + col, y, grad);
    total = row_sum<THREADS>(total, shared);
    const MaskRow<T> mask(a.mask, row);
    for (int64_t col = start; col < a.cols; col += kStep) {
      load_pair<T>(a, row * a.cols + col, y, grad);
      uint32_t kept = ~0u;
      if constexpr (masked) kept = mask.template kept_bits<N>(col);
      store_gradient<T>(a, row * a.cols + col, total, y, grad, kept);
    }
  }
}

template <class T, int N, int THREADS, int ITEMS>
void launch_rows(const Softmax& a, cudaStream_t stream) {
  constexpr int kBlock = row_block(THREADS);
  const unsigned grid = row_grid(a.rows, kBlock / THREADS, kBlock);
  if (a.grad != nullptr) {
    const auto kernel = a.mask.data != nullptr ? softmax_backward_kernel<T, N, THREADS, ITEMS, true>
                                               : softmax_backward_kernel<T, N, THREADS, ITEMS, false>;
    launch_overlapped(kernel, grid, kBlock, stream, a);
  } else {
    launch_overlapped(softmax_kernel<T, N, THREADS, ITEMS>, grid, kBlock, stream, a);
  }
}

template <class T, int N, int THREADS>
void launch_long(const Softmax& a, cudaStream_t stream) {
  const unsigned grid = row_grid(a.rows, 1, THREADS);
  if (a.grad != nullptr) {
    const auto kernel = a.mask.data != nullptr ? softmax_backward_long_kernel<T, N, THREADS, true>
                                               : softmax_backward_long_kernel<T, N, THREADS, false>;
    launch_overlapped(kernel, grid, THREADS, stream, a);
  } else {
    launch_overlapped(softmax_long_kernel<T, N, THREADS>, grid, THREADS, stream, a);
  }
}

template <class T>
void launch(const Softmax& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const bool packed = a.cols % N == 0 && aligned(a.x) && aligned(a.y) && aligned(a.grad);
  if (!packed) {
    if (a.cols <= 128) return launch_rows<T, 1, 32, 4>(a, stream);
    return launch_long<T, 1, 256>(a, stream);
  }
  if constexpr (sizeof(T) == 8) {
    launch_long<T, N, 256>(a, stream);  // a reference type: one kernel is enough
  } else {
    dispatch_rows<N>(
        a.cols / N, a.rows, [&](auto shape) { launch_rows<T, N, shape.threads, shape.items>(a, stream); },
        [&] { launch_long<T, N, 1024>(a, stream); });
  }
}

}  // namespace

int launch_softmax(const Softmax& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
