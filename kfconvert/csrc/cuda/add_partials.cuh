// totals[k][col] = the sum of partials[k][p][col] over p, in a fixed order, so that it is the same at every call
//   partials: (count, cols), in the accumulation type of the totals;  totals: (cols), any dtype
//
// The end of the backward passes that add up by column or channel: their blocks leave a row of partial sums each.
#pragma once

#include "vector.cuh"

namespace kfc {
namespace {

constexpr int kAddColumns = 32;
constexpr int kAddShares = 32;

// Two of them; a total that is null is not wanted.
struct ColumnSums {
  const void* partials[2];
  void* totals[2];
  int64_t count;
  int64_t cols;
};

// A block has 32 columns of sum blockIdx.y, and 32 threads for each, which add a share of the partials.
template <class T>
__global__ void __launch_bounds__(kAddColumns* kAddShares) add_partials_kernel(ColumnSums sums) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  __shared__ A shared[kAddShares][kAddColumns + 1];
  const A* partials = static_cast<const A*>(sums.partials[blockIdx.y]);
  T* total = static_cast<T*>(sums.totals[blockIdx.y]);
  if (total == nullptr) return;
  const int64_t col = static_cast<int64_t>(blockIdx.x) * kAddColumns + threadIdx.x;
  A sum = 0;
  if (col < sums.cols) {
#pragma unroll 8
    for (int64_t p = threadIdx.y; p < sums.count; p += kAddShares) sum += partials[p * sums.cols + col];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  // Each warp adds up the shares of one of the columns.
  A shares[1] = {shared[threadIdx.x][threadIdx.y]};
  lane_sums<kAddShares>(shares);
  const int64_t to = static_cast<int64_t>(blockIdx.x) * kAddColumns + threadIdx.y;
  if (threadIdx.x == 0 && to < sums.cols) total[to] = narrow<T>(shares[0]);
}

// `out`: the dtype of the totals.
inline void add_partials(const ColumnSums& sums, DType out, cudaStream_t stream) {
  if (sums.cols == 0 || (sums.totals[0] == nullptr && sums.totals[1] == nullptr)) return;
  const unsigned columns = static_cast<unsigned>((sums.cols + kAddColumns - 1) / kAddColumns);
  const dim3 grid(columns, sums.totals[1] == nullptr ? 1 : 2);
  KFC_DISPATCH_DTYPE(out, launch_overlapped(add_partials_kernel<T>, grid, dim3(kAddColumns, kAddShares), stream, sums));
}

}  // namespace
}  // namespace kfc
