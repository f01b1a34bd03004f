// act(conv(x) + bias) with a filter for each channel, kernels of 5 and 7, as products on tensor cores
//   x: (images, height, width, channels); weight: (kernel, kernel, channels)
//   y: (images, out_height, out_width, channels)
//
// On the ordinary cores, 49 multiplications for each element take longer than the way from memory. Eight rows of the
// result, in one column and channel, are products of a column of x (14 rows for a kernel of 7) and the Toeplitz matrix
// of a column of the filter. Columns of x, kColumns apart, are the rows of the product's first factor: mma m16n8k16. So
// a lane has kColumns neighbouring columns of the result in registers, and each column of x that it loads serves them
// all.
//
// Shared memory has a plane for each two channels, so that the lanes of a warp read different banks. A warp puts its
// results into the plane that only it has read, and the block writes them in packs of eight channels.
//
// In the Toeplitz matrix, zeros meet elements outside of a filter's window, and an infinite one would make NaN of them.
// So a warp with a result that is not finite computes its results again, tap by tap.
#include "kernels.h"
#include "mma.cuh"

namespace kfc {
namespace {

constexpr int kColumns = 7;  // of the result, in a slot; divides the widths of most models
constexpr int kTileRows = 8;
constexpr int kProducts = 16;   // rows of the first factor
constexpr int kOutPitch = 116;  // of rows of results; 2 t rows and 7 g columns are in 32 banks

// TALL: a block has 16 rows of the result and 8 slots, else 8 rows and 16 slots.
template <int KERNEL, bool TALL>
struct Tile {
  static constexpr int slots = TALL ? 8 : 16;
  static constexpr int out_rows = TALL ? 16 : 8;
  static constexpr int rows = out_rows - 1 + KERNEL;  // of x
  static constexpr int columns = kColumns - 1 + KERNEL;
};

// Writes the results of a thread's eight channels.
template <Act act, class T, bool TALL, int LANES>
__device__ __forceinline__ void write(const DepthwiseConvolution& a, const uint32_t* planes, int plane, int first,
                                      int first_slot, int first_row, int channel) {
  const int tiles = (a.out_width + kColumns - 1) / kColumns;
  const int line = a.out_width * a.channels;
  for (int p = first; p < kProducts * kColumns; p += LANES) {
    const int product = p / kColumns;
    const int slot = first_slot + (TALL ? product % 8 : product);
    const int row = first_row + (TALL ? product / 8 * kTileRows : 0);
    const int image = slot / tiles;
    const int column = slot % tiles * kColumns + p % kColumns;
    if (image >= a.images || column >= a.out_width) continue;
    T* y = static_cast<T*>(a.y) + ((int64_t{image} * a.out_height + row) * a.out_width + column) * a.channels + channel;
#pragma unroll
    for (int n = 0; n < kTileRows; ++n) {
      if (row + n >= a.out_height) break;
      const uint32_t* from = planes + n * kOutPitch + p;
      auto pack = pack_of<Pack<T, 8>>(make_uint4(from[0], from[plane], from[2 * plane], from[3 * plane]));
      if constexpr (act != kNone) {
        float v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) v[i] = widen(pack.v[i]);
        activate_each<act, typename MathFor<T>::type>(v, static_cast<float>(a.slope));
#pragma unroll
        for (int i = 0; i < 8; ++i) pack.v[i] = narrow<T>(v[i]);
      }
      store_pack(y + n * line, pack);
    }
  }
}

// A block has CHANNELS channels, and a warp two of them. pitch: of the rows of a plane; positions: columns of them.
template <class T, int KERNEL, bool TALL, int CHANNELS>
__global__ void __launch_bounds__(16 * CHANNELS, 32 / CHANNELS)
    tiles_kernel(const __grid_constant__ DepthwiseConvolution a, int pitch, int positions) {
  wait_for_previous_kernel();
  using G = Tile<KERNEL, TALL>;
  constexpr int kThreads = 16 * CHANNELS;
  constexpr int kPacks = CHANNELS / 8;
  constexpr int kTaps = KERNEL * KERNEL;
  extern __shared__ uint32_t planes[];
  __shared__ uint32_t filters[kTaps][CHANNELS / 2];
  __shared__ float2 biases[CHANNELS / 2];
  const int tiles = (a.out_width + kColumns - 1) / kColumns;
  const uint32_t groups = (a.channels + CHANNELS - 1) / CHANNELS;
  const uint32_t row_blocks = (a.out_height + G::out_rows - 1) / G::out_rows;
  uint32_t rest = blockIdx.x;
  const int first_channel = static_cast<int>(rest % groups) * CHANNELS;
  rest /= groups;
  const int first_row = static_cast<int>(rest % row_blocks) * G::out_rows;
  const int first_slot = static_cast<int>(rest / row_blocks) * G::slots;
  const int first_image = first_slot / tiles;
  const int first_tile = first_slot % tiles;
  const int plane = G::rows * pitch + 4;  // planes of neighbouring packs start 16 banks apart

  // The last block may have channels that do not exist: it reads others in their place, and writes none.
  constexpr int kOwnTaps = (kTaps * CHANNELS + kThreads - 1) / kThreads;
  const int own = threadIdx.x % CHANNELS;
  const int own_channel = first_channel + own < a.channels ? first_channel + own : a.channels - 1;
  T taps[kOwnTaps];
#pragma unroll
  for (int i = 0; i < kOwnTaps; ++i) {
    const int tap = threadIdx.x / CHANNELS + i * (kThreads / CHANNELS);
    if (tap < kTaps) taps[i] = static_cast<const T*>(a.weight)[tap * a.channels + own_channel];
  }
  float bias = 0;
  if (threadIdx.x < CHANNELS && a.bias != nullptr) bias = widen(static_cast<const T*>(a.bias)[own_channel]);

  // The slots of an image follow each other and share columns; those of another image start with its own padding.
  const int pack = threadIdx.x % kPacks;
  const bool has_channels = first_channel + pack * 8 < a.channels;
  const int top = first_row - a.pad_top;
  const int first_run = (G::slots < tiles - first_tile ? G::slots : tiles - first_tile) * kColumns + KERNEL - 1;
  const uint32_t run = tiles * kColumns + KERNEL - 1;
  for (int p = threadIdx.x / kPacks; p < positions; p += kThreads / kPacks) {
    int image = first_image;
    int column = p + first_tile * kColumns;
    if (p >= first_run) {
      const uint32_t beyond = p - first_run;
      image += 1 + static_cast<int>(beyond / run);
      column = static_cast<int>(beyond % run);
    }
    column -= a.pad_left;
    const bool inside = has_channels && image < a.images && column >= 0 && column < a.width;
    const T* from = static_cast<const T*>(a.x) + first_channel + pack * 8 +
                    ((int64_t{image} * a.height + top) * a.width + column) * a.channels;
    uint32_t* to = planes + pack * 4 * plane + p;
    constexpr int kStep = TALL ? G::rows / 2 : G::rows;  // loads in flight
#pragma unroll
    for (int begin = 0; begin < G::rows; begin += kStep) {
      uint4 words[kStep];
#pragma unroll
      for (int r = 0; r < kStep; ++r) {
        const int row = top + begin + r;
        words[r] = make_uint4(0, 0, 0, 0);
        if (inside && row >= 0 && row < a.height) words[r] = load_word<Pack<T, 8>>(from);
        from += int64_t{a.width} * a.channels;
      }
#pragma unroll
      for (int r = 0; r < kStep; ++r) {
        to[0] = words[r].x;
        to[plane] = words[r].y;
        to[2 * plane] = words[r].z;
        to[3 * plane] = words[r].w;
        to += pitch;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kOwnTaps; ++i) {
    const int tap = threadIdx.x / CHANNELS + i * (kThreads / CHANNELS);
    if (tap < kTaps) reinterpret_cast<T*>(filters[tap])[own] = taps[i];
  }
  if (threadIdx.x < CHANNELS) reinterpret_cast<float*>(biases)[own] = bias;
  __syncthreads();

  const int pair = threadIdx.x / 32;
  const int g = threadIdx.x % 32 / 4;
  const int t = threadIdx.x % 4;
  // Element (row of x, row of the result) of the Toeplitz matrix is the tap number `row of x - row of the result`.
  uint32_t b[KERNEL][2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int ky = 2 * t + 8 * half - g;
#pragma unroll
    for (int kx = 0; kx < KERNEL; ++kx) {
      const uint32_t upper = ky >= 0 && ky < KERNEL ? filters[ky * KERNEL + kx][pair] : 0;
      const uint32_t lower = ky >= -1 && ky < KERNEL - 1 ? filters[(ky + 1) * KERNEL + kx][pair] : 0;
      b[kx][0][half] = pair_of(upper, lower, 0);
      b[kx][1][half] = pair_of(upper, lower, 1);
    }
  }
  float sums[kColumns][2][4];
  const float2 start = biases[pair];
#pragma unroll
  for (int o = 0; o < kColumns; ++o) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[o][0][i] = start.x;
      sums[o][1][i] = start.y;
    }
  }
  uint32_t* own_plane = planes + pair * plane;
  const uint32_t* from[2];  // of rows g and g + 8 of the first factor
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int slot = TALL ? g : g + 8 * i;
    const int row = 2 * t + (TALL ? kTileRows * i : 0);
    from[i] = own_plane + row * pitch + slot * kColumns + (first_tile + slot) / tiles * (KERNEL - 1);
  }
#pragma unroll
  for (int column = 0; column < G::columns; ++column) {
    uint32_t x[2][2][2];  // row of the factor, channel, half of its columns
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t upper = 0;
        uint32_t lower = 0;
        if (half == 0 || 2 * t + 8 < kTileRows - 1 + KERNEL) {
          upper = from[i][8 * half * pitch + column];
          lower = from[i][(8 * half + 1) * pitch + column];
        }
        x[i][0][half] = pair_of(upper, lower, 0);
        x[i][1][half] = pair_of(upper, lower, 1);
      }
    }
#pragma unroll
    for (int o = 0; o < kColumns; ++o) {
      const int kx = column - o;
      if (kx < 0 || kx >= KERNEL) continue;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        multiply_add<T>(sums[o][c], x[0][c][0], x[1][c][0], x[0][c][1], x[1][c][1], b[kx][c][0], b[kx][c][1]);
      }
    }
  }
  float totals[4] = {};
#pragma unroll
  for (int o = 0; o < kColumns; ++o) {
#pragma unroll
    for (int i = 0; i < 4; ++i) totals[i] += sums[o][0][i] + sums[o][1][i];
  }
  if (__any_sync(0xffffffffu, !isfinite(totals[0] + totals[1] + totals[2] + totals[3]))) {
#pragma unroll
    for (int o = 0; o < kColumns; ++o) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t* window = from[i / 2] + i % 2 * pitch + o;
        float sum[2] = {start.x, start.y};
#pragma unroll 1
        for (int tap = 0; tap < kTaps; ++tap) {
          float v[2];
          float w[2];
          widen_word<T>(window[tap / KERNEL * pitch + tap % KERNEL], v);
          widen_word<T>(filters[tap][pair], w);
          sum[0] = fmaf(v[0], w[0], sum[0]);
          sum[1] = fmaf(v[1], w[1], sum[1]);
        }
        sums[o][0][i] = sum[0];
        sums[o][1][i] = sum[1];
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int o = 0; o < kColumns; ++o) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Pack<T, 2> both;
      both.v[0] = narrow<T>(sums[o][0][i]);
      both.v[1] = narrow<T>(sums[o][1][i]);
      own_plane[(2 * t + i % 2) * kOutPitch + (g + i / 2 * 8) * kColumns + o] = word_of(both);
    }
  }
  __syncthreads();
  if (!has_channels) return;
  KFC_DISPATCH_ACTIVATION(
      a.activation, (write<act, T, TALL, kThreads / kPacks>(a, planes + pack * 4 * plane, plane, threadIdx.x / kPacks,
                                                            first_slot, first_row, first_channel + pack * 8)))
}

template <int KERNEL, bool TALL>
int64_t grid_of(const DepthwiseConvolution& a, int channels) {
  using G = Tile<KERNEL, TALL>;
  const int64_t slots = a.images * blocks_of(a.out_width, kColumns);
  return blocks_of(slots, G::slots) * blocks_of(a.out_height, G::out_rows) * blocks_of(a.channels, channels);
}

template <class T, int KERNEL, bool TALL, int CHANNELS>
void launch(const DepthwiseConvolution& a, cudaStream_t stream) {
  using G = Tile<KERNEL, TALL>;
  const int tiles = static_cast<int>(blocks_of(a.out_width, kColumns));
  // The most images that a block has slots of.
  const int first_of_two = (G::slots - 2) / tiles + 2;
  const int images = G::slots % tiles == 0 ? G::slots / tiles : (tiles % G::slots == 0 ? 1 : first_of_two);
  const int positions = G::slots * kColumns + images * (KERNEL - 1);
  const int pitch = positions + (20 - positions % 16) % 16;  // 4 more than a multiple of 16: rows are in other banks
  const int bytes = (G::rows * pitch + 4) * (CHANNELS / 2) * static_cast<int>(sizeof(uint32_t));
  launch_with_memory(tiles_kernel<T, KERNEL, TALL, CHANNELS>, static_cast<unsigned>(grid_of<KERNEL, TALL>(a, CHANNELS)),
                     16 * CHANNELS, bytes, stream, a, pitch, positions);
}

template <class T, int KERNEL>
void launch_tile(const DepthwiseConvolution& a, cudaStream_t stream) {
  // Eight channels are half of a sector of memory, but small images fill the device only so.
  if (2 * grid_of<KERNEL, false>(a, 16) < multiprocessors()) return launch<T, KERNEL, false, 8>(a, stream);
  if (a.out_height > kTileRows) return launch<T, KERNEL, true, 16>(a, stream);
  launch<T, KERNEL, false, 16>(a, stream);
}

template <class T>
void launch_kernel(const DepthwiseConvolution& a, cudaStream_t stream) {
  if (a.kernel == 7) return launch_tile<T, 7>(a, stream);
  launch_tile<T, 5>(a, stream);
}

}  // namespace

int launch_depthwise_tiles(const DepthwiseConvolution& a, void* stream) {
  KFC_DISPATCH_HALF(a.dtype, launch_kernel<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
