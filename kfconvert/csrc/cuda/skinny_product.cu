// Products of 1 to 16 rows, as in a step of generation, with bias and activation or gate
//   x: (rows, in); weight: (out, in) or, transposed, (in, out); y: (rows, out)
// The weight may be of int8 or float8 numbers, with a factor for each of its rows.
//
// Limited by the weight's way from memory. It is read once, in words that become the tensor cores' operands as they
// are: the inputs are taken in an order that makes those of a word the ones that a lane holds, which changes no sum but
// in its order. The warps of a block divide the inputs among them. Where nothing ahead writes to the weight, what a
// block starts with is on its way while the kernels ahead still run: between two products of a model lies a small
// kernel or two, in which memory would be idle.
#include "skinny_product.cuh"

namespace kfc {
namespace {

// Of a weight that is read once the first level cache keeps nothing.
template <class P, class T>
__device__ __forceinline__ Word<P> stream_word(const T* from) {
  return __ldcg(reinterpret_cast<const Word<P>*>(from));
}

// A block has COLS columns of a transposed weight. TILES: 2 where x has more than eight rows.
template <class T, int COLS, int TILES, int WARPS, int STEPS>
__global__ void __launch_bounds__(32 * WARPS) skinny_columns_kernel(const __grid_constant__ SkinnyProduct a) {
  constexpr int kEach = COLS / 8;  // columns of a lane
  using P = Pack<T, kEach>;
  constexpr int kStep = 16;
  constexpr int64_t kSpan = WARPS * kStep * STEPS;
  __shared__ float sums[WARPS][TILES * kRows][COLS + 1];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int group = lane / 4;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * COLS;
  const int64_t own = first + group * kEach;
  const T* weight = static_cast<const T*>(a.weight) + (own < a.out ? own : 0);
  const auto input = [&](int step) { return (step * WARPS + warp) * kStep + lane % 4 * 4; };
  Word<P> w[STEPS][4];
  const auto load_weight = [&](int64_t begin) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int64_t at = begin + input(step);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        w[step][i] = Word<P>{};
        if (at < a.in) w[step][i] = stream_word<P>(weight + (at + i) * a.weight_stride);
      }
    }
  };
  if (a.early) load_weight(0);
  wait_for_previous_kernel();
  if (!a.early) load_weight(0);
  const T* rows[TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int64_t row = tile * kRows + group;
    rows[tile] = static_cast<const T*>(a.x) + (row < a.rows ? row : a.rows - 1) * a.x_stride;
  }
  float c[kEach][4] = {};
  for (int64_t begin = 0; begin < a.in; begin += kSpan) {
    uint2 x[STEPS][TILES] = {};
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int64_t at = begin + input(step);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        if (at < a.in) x[step][tile] = load_word<Pack<T, 4>>(rows[tile] + at);
      }
    }
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      uint32_t parts[4][kEach / 2];
      memcpy(parts, w[step], sizeof(parts));
      const uint2 lower = TILES > 1 ? x[step][TILES - 1] : make_uint2(0, 0);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const uint32_t b0 = pair_of(parts[0][j / 2], parts[1][j / 2], j % 2);
        const uint32_t b1 = pair_of(parts[2][j / 2], parts[3][j / 2], j % 2);
        multiply_add<T>(c[j], x[step][0].x, lower.x, x[step][0].y, lower.y, b0, b1);
      }
    }
    if (begin + kSpan < a.in) load_weight(begin + kSpan);
  }
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
#pragma unroll
    for (int i = 0; i < 2 * TILES; ++i) {
      sums[warp][i / 2 * kRows + group][(lane % 4 * 2 + i % 2) * kEach + j] = c[j][i];
    }
  }
  __syncthreads();
  const int at = threadIdx.x % COLS;
  if (first + at >= a.out) return;
  for (int64_t row = threadIdx.x / COLS; row < a.rows; row += 32 * WARPS / COLS) {
    float value = 0;
#pragma unroll
    for (int k = 0; k < WARPS; ++k) value += sums[k][row][at];
    finish<T>(a, row, first + at, terms_of<T>(a, first + at), value, 0);
  }
}

// The numbers are those that were fastest for the layers of GPT-2 on an H100.
template <class T, int TILES>
void launch_columns(const SkinnyProduct& a, cudaStream_t stream) {
  constexpr int kWarps = 16;
  // Small layers take narrow blocks, so that there are enough of them.
  const bool wide = a.out > 16 * multiprocessors();
  const auto kernel =
      wide ? skinny_columns_kernel<T, 32, TILES, kWarps, 4> : skinny_columns_kernel<T, 16, TILES, kWarps, 6>;
  launch_overlapped(kernel, static_cast<unsigned>(blocks_of(a.out, wide ? 32 : 16)), 32 * kWarps, stream, a);
}

// Whether the launch goes into a CUDA graph. The default stream cannot be recorded, nor asked while another is.
bool is_recorded(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  return stream != nullptr && cudaStreamIsCapturing(stream, &status) == cudaSuccess &&
         status == cudaStreamCaptureStatusActive;
}

}  // namespace

bool has_tensor_cores() { return device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 8; }

int launch_skinny_product(const SkinnyProduct& product, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  SkinnyProduct a = product;
  a.early = is_recorded(on);
  if (a.transposed) {
    KFC_DISPATCH_HALF(a.dtype, a.rows <= kRows ? launch_columns<T, 1>(a, on) : launch_columns<T, 2>(a, on));
  } else {
    launch_skinny_rows(a, on);
  }
  return cudaGetLastError();
}

}  // namespace kfc
