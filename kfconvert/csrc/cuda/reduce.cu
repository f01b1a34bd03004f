// Sums over rows, or over parts of rows, of squares, magnitudes or squared differences
//   x, other: (rows, cols);  y: (rows, parts)
//
// Limited by memory bandwidth: each element is read once, 16 bytes a thread and access, by 8 threads, a warp
// or a block a row, whichever is enough for its length. Few long rows are cut into parts that fill the device
// (common/reduce.h).
#include "../common/reduce_terms.h"
#include "kernels.h"
#include "vector.cuh"

namespace kfc {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;  // 2048 threads
constexpr int kWarpsPerMultiprocessor = 64;
// A part has at least 4 packs of float for each thread, and so few elements that no float adds up more than
// 64 of them. A row that one block reads sooner than a second launch begins is not cut.
constexpr int64_t kLeastPart = 4096;
constexpr int64_t kMostPart = 65536;
constexpr int64_t kShortRow = 16384;

// Threads of a block: rows that a warp or less takes share one.
__host__ __device__ constexpr int block_of(int threads) { return threads <= 32 ? kThreads : threads; }

// The rows, or parts of rows, that are summed up. All have `length` elements but for the last part of a row. Rows that
// are not cut, and the parts of a single row, lie one after the other.
struct Pieces {
  int64_t count;
  int64_t total;  // elements of all that lie one after the other
  int length;     // at most kMostPart, or as many as a row has parts
  bool by_row;    // several rows that are cut

  explicit Pieces(const Reduce& a)
      : count(a.rows * a.parts),
        total(a.parts == 1 ? a.rows * a.cols : a.cols),
        length(static_cast<int>(a.parts == 1 ? a.cols : a.part)),
        by_row(a.rows > 1 && a.parts > 1) {}
};

template <class F, int N, class T, class A>
__device__ __forceinline__ void add_terms(const T* x, const T* other, A (&sums)[N]) {
  A v[N];
  A w[N] = {};
  load<N>(x, v);
  if constexpr (F::binary) load<N>(other, w);
#pragma unroll
  for (int j = 0; j < N; ++j) sums[j] += F::of(v[j], w[j]);
}

template <class T>
__device__ __forceinline__ void write(void* y, int64_t at, double value) {
  static_cast<T*>(y)[at] = narrow<T>(static_cast<typename Accumulate<T>::type>(value));
}

// In double, so that 1 / n is not rounded first.
__device__ __forceinline__ void write_result(const Reduce& a, int64_t at, double total) {
  KFC_DISPATCH_DTYPE(a.out, write<T>(a.y, at, total * a.factor));
}

// THREADS threads a row or part. `cols` of whole packs of N elements, or a single row.
template <class F, class T, int N, int THREADS>
__global__ void __launch_bounds__(block_of(THREADS)) reduce_kernel(Reduce a, Pieces pieces) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  constexpr int kRows = block_of(THREADS) / THREADS;
  __shared__ A shared[32];
  const int lane = threadIdx.x % THREADS;
  // All threads of a block make the same number of turns: the sums need every one of them.
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kRows; first < pieces.count;
       first += static_cast<int64_t>(gridDim.x) * kRows) {
    const int64_t piece = first + threadIdx.x / THREADS;
    const bool active = piece < pieces.count;
    A sums[N] = {};
    if (active) {
      int64_t begin = piece * pieces.length;
      int64_t left = pieces.total - begin;
      if (pieces.by_row) {  // a division of 64-bit integers costs as much as a small row
        const int64_t row = piece / a.parts;
        const int64_t before = (piece - row * a.parts) * pieces.length;
        begin = row * a.cols + before;
        left = a.cols - before;
      }
      const int cols = left < pieces.length ? static_cast<int>(left) : pieces.length;
      const int packed = cols - cols % N;
      const T* x = static_cast<const T*>(a.x) + begin;
      const T* other = F::binary ? static_cast<const T*>(a.other) + begin : nullptr;
#pragma unroll 4
      for (int col = lane * N; col < packed; col += THREADS * N) add_terms<F>(x + col, other + col, sums);
      if (N > 1 && packed + lane < cols) {
        A rest[1] = {};
        add_terms<F>(x + packed + lane, other + packed + lane, rest);
        sums[0] += rest[0];
      }
    }
    A total = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) total += sums[j];
    total = row_sum<THREADS>(total, shared);
    if (active && lane == 0) write_result(a, piece, static_cast<double>(total));
  }
}

template <class F, class T, int N, int THREADS>
void launch_rows(const Reduce& a, cudaStream_t stream) {
  constexpr int kRows = block_of(THREADS) / THREADS;
  const Pieces pieces(a);
  const int64_t wanted = (pieces.count + kRows - 1) / kRows;
  const int64_t most = static_cast<int64_t>(multiprocessors()) * kBlocksPerMultiprocessor * 4;
  const unsigned grid = static_cast<unsigned>(wanted < most ? wanted : most);
  launch_overlapped(reduce_kernel<F, T, N, THREADS>, grid, block_of(THREADS), stream, a, pieces);
}

template <class F, class T, int N>
void launch_packs(const Reduce& a, cudaStream_t stream) {
  const int64_t packs = a.part / N;
  if (packs <= 16) return launch_rows<F, T, N, 8>(a, stream);
  // Enough rows for a warp each keep more loads in flight than blocks, which wait for their sums.
  const bool many = a.rows * a.parts >= static_cast<int64_t>(multiprocessors()) * kWarpsPerMultiprocessor;
  if (packs <= 256 || (many && packs <= 1024)) return launch_rows<F, T, N, 32>(a, stream);
  // 4 packs a thread are in flight at once; blocks of more threads than needed for that do not all fit.
  if (packs <= 512) return launch_rows<F, T, N, 128>(a, stream);
  return launch_rows<F, T, N, kThreads>(a, stream);
}

template <class F, class T>
void launch(const Reduce& a, cudaStream_t stream) {
  constexpr int N = kPackBytes / sizeof(T);
  const bool packed = (a.rows == 1 || a.cols % N == 0) && aligned(a.x) && aligned(a.other);
  if (packed) return launch_packs<F, T, N>(a, stream);
  return launch_packs<F, T, 1>(a, stream);
}

}  // namespace

int64_t reduce_part(const Reduce& a) {
  const int64_t blocks = static_cast<int64_t>(multiprocessors()) * kBlocksPerMultiprocessor;
  if (a.cols <= kShortRow || (a.cols <= kMostPart && 2 * a.rows > blocks)) return a.cols;
  const int64_t parts = (blocks + a.rows - 1) / a.rows;
  int64_t part = (a.cols + parts - 1) / parts;
  part = (part + kLeastPart - 1) / kLeastPart * kLeastPart;
  return part < kMostPart ? part : kMostPart;
}

int launch_reduce(const Reduce& a, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  KFC_DISPATCH_TERM(a.term, KFC_DISPATCH_DTYPE(a.dtype, (launch<F, T>(a, cuda_stream))));
  return cudaGetLastError();
}

}  // namespace kfc
