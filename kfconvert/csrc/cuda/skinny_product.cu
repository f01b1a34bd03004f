// Products of 1 to 16 rows, as in a step of generation, with bias and activation or gate
//   x: (rows, in); weight: (out, in) or, transposed, (in, out); y: (rows, out)
// The weight may be of int8 or float8 numbers, with a factor for each of its rows.
//
// Limited by the weight's way from memory. It is read once, in words that become the tensor cores' operands as they
// are: the inputs are taken in an order that makes those of a word the ones that a lane holds, which changes no sum but
// in its order. The warps of a block divide the inputs among them. Where nothing ahead writes to the weight, what a
// block starts with is on its way while the kernels ahead still run: between two products of a model lies a small
// kernel or two, in which memory would be idle.
#include "kernels.h"
#include "mma.cuh"

namespace kfc {
namespace {

// The outputs of a tile, and the rows of x that go with them.
constexpr int kTile = 16;
constexpr int kRows = 8;

// Of a weight that is read once the first level cache keeps nothing.
template <class P, class T>
__device__ __forceinline__ Word<P> stream_word(const T* from) {
  return __ldcg(reinterpret_cast<const Word<P>*>(from));
}

// Eight elements of a word of the weight as halves of T: the first eight (part 0), or the last.
template <class T, class W>
__device__ __forceinline__ uint4 halves_in(const uint4& word, int part) {
  if constexpr (sizeof(T) == sizeof(W)) {
    return word;
  } else {
    const uint32_t first = part == 0 ? word.x : word.z;
    const uint32_t second = part == 0 ? word.y : word.w;
    return make_uint4(halves_of<T, W>(first, false), halves_of<T, W>(first, true), halves_of<T, W>(second, false),
                      halves_of<T, W>(second, true));
  }
}

// The tensor that has row `at`: `first`, or one of `others`. `at` becomes the number of the row in it.
__device__ __forceinline__ const void* tensor_of(const SkinnyProduct& a, const void* first, const void* const* others,
                                                 int64_t& at) {
  const void* found = first;
  int64_t start = 0;
#pragma unroll
  for (int i = 0; i < kMostWeights - 1; ++i) {
    if (at >= a.starts[i]) {
      found = others[i];
      start = a.starts[i];
    }
  }
  at -= start;
  return found;
}

// The factor of row `at` of the weight.
__device__ __forceinline__ float factor_of(const SkinnyProduct& a, int64_t at) {
  const void* scale = tensor_of(a, a.scale, a.scales, at);
  if (a.scale_dtype == DType::f16) return widen(static_cast<const __half*>(scale)[at]);
  if (a.scale_dtype == DType::bf16) return widen(static_cast<const __nv_bfloat16*>(scale)[at]);
  return static_cast<const float*>(scale)[at];
}

// Row `at` of the weight.
template <class T, class W>
__device__ __forceinline__ const W* weight_row(const SkinnyProduct& a, int64_t at) {
  const void* weight = a.weight;
  if constexpr (sizeof(W) < sizeof(T)) weight = tensor_of(a, a.weight, a.weights, at);
  return static_cast<const W*>(weight) + at * a.weight_stride;
}

// act(value + bias) of output `at`, or with `other`, the sum of the other half, act(gate) * up.
template <class T>
__device__ __forceinline__ void finish(const SkinnyProduct& a, int64_t row, int64_t at, float value, float other) {
  const T* bias = static_cast<const T*>(a.bias);
  if (a.scale != nullptr) value *= factor_of(a, at);
  if (a.scale != nullptr && a.gated) other *= factor_of(a, a.out + at);
  if (bias != nullptr) value += widen(bias[at]);
  if (a.gated) {
    if (bias != nullptr) other += widen(bias[a.out + at]);
    if (!a.gate_first) {
      const float gate = other;
      other = value;
      value = gate;
    }
  }
  float activated[1] = {value};
  activate_as<kAny, T>(a.activation, activated, static_cast<float>(a.slope));
  static_cast<T*>(a.y)[row * a.out + at] = narrow<T>(a.gated ? activated[0] * other : activated[0]);
}

// A block has 16 rows of the weight at a time, or 8 of each half. W: the elements of the weight. TILES: of eight rows
// of x. STEPS: so many words of each row are in flight for every lane.
template <class T, class W, int TILES, int WARPS, int STEPS>
__global__ void __launch_bounds__(32 * WARPS) skinny_rows_kernel(const __grid_constant__ SkinnyProduct a) {
  constexpr int kEach = kPackBytes / sizeof(W);  // elements of a word of the weight
  constexpr int kParts = sizeof(T) / sizeof(W);  // words of x that go with it
  using P = Pack<W, kEach>;
  // A warp takes whole lines of 128 bytes, in two words a lane.
  constexpr int kLine = 8 * kEach;
  constexpr int64_t kSpan = WARPS * kLine * STEPS / 2;  // inputs that the block takes at a time
  __shared__ float sums[WARPS][TILES * kRows][kTile + 1];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int group = lane / 4;
  const int outputs = a.gated ? kTile / 2 : kTile;
  const int64_t tiles = (a.out + outputs - 1) / outputs;
  const auto column = [&](int step) {
    return warp * kLine + step / 2 * WARPS * kLine + step % 2 * (kLine / 2) + lane % 4 * kEach;
  };
  uint4 w[STEPS][2];
  // Outputs beyond the last read the weight of the last, and are not written.
  const auto load_weight = [&](int64_t tile, int64_t begin) {
    int64_t upper = tile * outputs + group;
    int64_t lower = a.gated ? upper : upper + kTile / 2;
    upper = upper < a.out ? upper : a.out - 1;
    lower = (lower < a.out ? lower : a.out - 1) + (a.gated ? a.out : 0);
    const W* upper_row = weight_row<T, W>(a, upper);
    const W* lower_row = weight_row<T, W>(a, lower);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int64_t at = begin + column(step);
      w[step][0] = w[step][1] = make_uint4(0, 0, 0, 0);
      if (at < a.in) {
        w[step][0] = stream_word<P>(upper_row + at);
        w[step][1] = stream_word<P>(lower_row + at);
      }
    }
  };
  if (a.early) load_weight(blockIdx.x, 0);
  wait_for_previous_kernel();
  if (!a.early) load_weight(blockIdx.x, 0);
  const T* rows[TILES];
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    const int64_t row = tile * kRows + group;
    rows[tile] = static_cast<const T*>(a.x) + (row < a.rows ? row : a.rows - 1) * a.x_stride;
  }
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float c[TILES][4] = {};
    for (int64_t begin = 0; begin < a.in; begin += kSpan) {
      uint4 x[STEPS][TILES][kParts] = {};
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int64_t at = begin + column(step);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
#pragma unroll
          for (int part = 0; part < kParts; ++part) {
            if (at < a.in) x[step][i][part] = load_word<Pack<T, 8>>(rows[i] + at + 8 * part);
          }
        }
      }
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          const uint4 u = halves_in<T, W>(w[step][0], part);
          const uint4 v = halves_in<T, W>(w[step][1], part);
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            multiply_add<T>(c[i], u.x, v.x, u.y, v.y, x[step][i][part].x, x[step][i][part].y);
            multiply_add<T>(c[i], u.z, v.z, u.w, v.w, x[step][i][part].z, x[step][i][part].w);
          }
        }
      }
      // What comes next is on its way while the sums are put together.
      if (begin + kSpan < a.in) {
        load_weight(tile, begin + kSpan);
      } else if (tile + gridDim.x < tiles) {
        load_weight(tile + gridDim.x, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[warp][i * kRows + lane % 4 * 2 + k % 2][group + k / 2 * 8] = c[i][k];
    }
    __syncthreads();
    const int at = threadIdx.x % kTile;
    const int64_t output = tile * outputs + at;
    if (at < outputs && output < a.out) {
      for (int64_t row = threadIdx.x / kTile; row < a.rows; row += 32 * WARPS / kTile) {
        float value = 0;
        float other = 0;
#pragma unroll
        for (int k = 0; k < WARPS; ++k) {
          value += sums[k][row][at];
          if (a.gated) other += sums[k][row][at + outputs];
        }
        finish<T>(a, row, output, value, other);
      }
    }
    __syncthreads();
  }
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
    finish<T>(a, row, first + at, value, 0);
  }
}

template <int WARPS>
void launch_blocks(void (*kernel)(SkinnyProduct), int64_t blocks, const SkinnyProduct& a, cudaStream_t stream) {
  launch_overlapped(kernel, static_cast<unsigned>(blocks), 32 * WARPS, stream, a);
}

// The numbers of warps, steps and blocks are those that were fastest for the layers of LLaMA 8B and 1.1B and Qwen3 0.6B
// on an H200.
template <class T, class W, int TILES>
void launch_rows(const SkinnyProduct& a, cudaStream_t stream) {
  const int64_t processors = multiprocessors();
  const int64_t tiles = blocks_of(a.out, a.gated ? kTile / 2 : kTile);
  const int64_t blocks = tiles < 4 * processors ? tiles : 4 * processors;
  constexpr bool kBytes = sizeof(W) == 1;
  if constexpr (TILES > 1) {
    if (kBytes && tiles > processors) return launch_blocks<8>(skinny_rows_kernel<T, W, TILES, 8, 2>, tiles, a, stream);
    launch_blocks<8>(skinny_rows_kernel<T, W, TILES, 8, 4>, blocks, a, stream);
  } else if (kBytes ? tiles > 2 * processors : a.in <= 1024) {
    launch_blocks<4>(skinny_rows_kernel<T, W, TILES, 4, 8>, tiles, a, stream);
  } else if constexpr (!kBytes) {
    launch_blocks<8>(skinny_rows_kernel<T, W, TILES, 8, 8>, blocks, a, stream);
  } else if (tiles > processors) {
    launch_blocks<16>(skinny_rows_kernel<T, W, TILES, 16, 2>, blocks, a, stream);
  } else {
    launch_blocks<16>(skinny_rows_kernel<T, W, TILES, 16, 4>, blocks, a, stream);
  }
}

// The numbers for transposed weights are those that were fastest for the layers of GPT-2 on an H100.
template <class T, int TILES>
void launch(const SkinnyProduct& a, cudaStream_t stream) {
  const int64_t processors = multiprocessors();
  if (a.numbers == Numbers::int8) return launch_rows<T, int8_t, TILES>(a, stream);
  if (a.numbers == Numbers::float8) return launch_rows<T, Float8, TILES>(a, stream);
  if (a.transposed) {
    // Small layers take narrow blocks, so that there are enough of them.
    if (a.out > 16 * processors) {
      return launch_blocks<16>(skinny_columns_kernel<T, 32, TILES, 16, 4>, blocks_of(a.out, 32), a, stream);
    }
    return launch_blocks<16>(skinny_columns_kernel<T, 16, TILES, 16, 6>, blocks_of(a.out, 16), a, stream);
  }
  launch_rows<T, T, TILES>(a, stream);
}

template <class T>
void launch_tiles(const SkinnyProduct& a, cudaStream_t stream) {
  if (a.rows <= kRows) return launch<T, 1>(a, stream);
  launch<T, 2>(a, stream);
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
  KFC_DISPATCH_HALF(a.dtype, launch_tiles<T>(a, on));
  return cudaGetLastError();
}

}  // namespace kfc
