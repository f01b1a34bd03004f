// act(conv(x) + bias) with a filter for each channel, kernels of 3, and of 5 with a stride of 2
//   x: (images, height, width, channels); weight: (kernel, kernel, channels)
//   y: (images, out_height, out_width, channels)
//
// Limited by memory bandwidth. A thread has kVector channels and kColumns columns of the result, and walks down the
// rows of x. It reads each once, and keeps the filters and the sums of all rows of the result that the row of x belongs
// to in registers. The next row is on its way meanwhile.
#include "kernels.h"
#include "vector.cuh"

namespace kfc {
namespace {

constexpr int kColumns = 2;
constexpr int kBlock = 128;
constexpr int kBlocks = 4;  // on a multiprocessor

template <int KERNEL>
constexpr int kVector = KERNEL == 3 ? 4 : 2;  // of more channels the registers do not hold the filters

// rows: of the result, that a thread has.
template <class T, int KERNEL, int STRIDE>
__global__ void __launch_bounds__(kBlock, kBlocks)
    rows_kernel(const __grid_constant__ DepthwiseConvolution a, int rows) {
  wait_for_previous_kernel();
  constexpr int kEach = kVector<KERNEL>;
  constexpr int kInputs = (kColumns - 1) * STRIDE + KERNEL;  // columns of x
  constexpr int kPending = (KERNEL + STRIDE - 1) / STRIDE;   // rows of the result that a row of x belongs to
  constexpr uint32_t kBytes = sizeof(T);
  using P = Pack<T, kEach>;
  const uint32_t groups = a.channels / kEach;
  const uint32_t tiles = (a.out_width + kColumns - 1) / kColumns;
  const uint32_t segments = (a.out_height + rows - 1) / rows;
  uint32_t rest = blockIdx.x * kBlock + threadIdx.x;
  const int channel = static_cast<int>(rest % groups) * kEach;
  rest /= groups;
  const int out_left = static_cast<int>(rest % tiles) * kColumns;
  rest /= tiles;
  const int begin = static_cast<int>(rest % segments) * rows;
  const uint32_t image = rest / segments;
  if (image >= a.images) return;
  const int end = begin + rows < a.out_height ? begin + rows : a.out_height;

  float filter[KERNEL][KERNEL][kEach];
#pragma unroll
  for (int i = 0; i < KERNEL * KERNEL; ++i) {
    load<kEach>(static_cast<const T*>(a.weight) + i * a.channels + channel, filter[i / KERNEL][i % KERNEL]);
  }

  // Offsets in bytes, modulo 2^32: those of columns and rows outside of the image are not used.
  const uint32_t pixel = a.channels * kBytes;
  const uint32_t line = pixel * a.width;
  const uint32_t out_line = pixel * a.out_width;
  const int left = out_left * STRIDE - a.pad_left;
  const int top = begin * STRIDE - a.pad_top;
  uint32_t from = ((image * a.height + top) * a.width + left) * pixel + channel * kBytes;
  uint32_t to = ((image * a.out_height + begin) * a.out_width + out_left) * pixel + channel * kBytes;
  uint32_t inside = 0;  // a bit for each column
#pragma unroll
  for (int c = 0; c < kInputs; ++c) inside |= (left + c >= 0 && left + c < a.width ? 1u : 0u) << c;
  Word<P> next[kInputs] = {};  // zeros remain where a column is outside
  const auto fetch = [&](int row) {
    if (row >= 0 && row < a.height) {
#pragma unroll
      for (int c = 0; c < kInputs; ++c) {
        if (inside >> c & 1) next[c] = load_word<P>(static_cast<const char*>(a.x) + (from + c * pixel));
      }
    }
    from += line;
  };

  // sums[j]: row `step - j` of the result, of which kernel row `part + STRIDE * j` meets row `part` of the step.
  float sums[kPending][kColumns * kEach] = {};
  fetch(top);
  for (int step = begin; step < end + kPending - 1; ++step) {
#pragma unroll
    for (int part = 0; part < STRIDE; ++part) {
      const int row = step * STRIDE + part - a.pad_top;
      float x[kInputs][kEach];
#pragma unroll
      for (int c = 0; c < kInputs; ++c) widen_word<T>(next[c], x[c]);
      fetch(row + 1);
      if (row < 0 || row >= a.height) continue;
#pragma unroll
      for (int j = 0; j < kPending; ++j) {
        const int ky = part + STRIDE * j;
        if (ky >= KERNEL) continue;
#pragma unroll
        for (int i = 0; i < kColumns * kEach; ++i) {
#pragma unroll
          for (int kx = 0; kx < KERNEL; ++kx) {
            sums[j][i] = fmaf(x[i / kEach * STRIDE + kx][i % kEach], filter[ky][kx][i % kEach], sums[j][i]);
          }
        }
      }
    }
    if (step - begin >= kPending - 1) {
      float bias[kEach] = {};
      if (a.bias != nullptr) load<kEach>(static_cast<const T*>(a.bias) + channel, bias);
#pragma unroll
      for (int i = 0; i < kColumns * kEach; ++i) sums[kPending - 1][i] += bias[i % kEach];
      activate_pack<T>(a.activation, sums[kPending - 1], static_cast<float>(a.slope));
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (out_left + c >= a.out_width) continue;
        P y;
#pragma unroll
        for (int i = 0; i < kEach; ++i) y.v[i] = narrow<T>(sums[kPending - 1][c * kEach + i]);
        store_pack(static_cast<char*>(a.y) + (to + c * pixel), y);
      }
      to += out_line;
    }
#pragma unroll
    for (int j = kPending - 1; j >= 0; --j) {
#pragma unroll
      for (int i = 0; i < kColumns * kEach; ++i) sums[j][i] = j > 0 ? sums[j > 0 ? j - 1 : 0][i] : 0.0f;
    }
  }
}

template <class T, int KERNEL, int STRIDE>
void launch(const DepthwiseConvolution& a, cudaStream_t stream) {
  const int64_t columns = a.images * blocks_of(a.out_width, kColumns) * (a.channels / kVector<KERNEL>);
  // Long walks read few rows twice, but all multiprocessors need threads.
  const int64_t wanted = int64_t{multiprocessors()} * kBlocks * kBlock / columns;
  const int64_t segments = wanted < 1 ? 1 : (wanted < a.out_height ? wanted : a.out_height);
  const int rows = static_cast<int>(blocks_of(a.out_height, segments));
  const int64_t threads = columns * blocks_of(a.out_height, rows);
  launch_overlapped(rows_kernel<T, KERNEL, STRIDE>, static_cast<unsigned>(blocks_of(threads, kBlock)), kBlock, stream,
                    a, rows);
}

template <class T>
void launch_kernel(const DepthwiseConvolution& a, cudaStream_t stream) {
  if (a.kernel == 3) return a.stride == 1 ? launch<T, 3, 1>(a, stream) : launch<T, 3, 2>(a, stream);
  launch<T, 5, 2>(a, stream);
}

}  // namespace

int launch_depthwise_rows(const DepthwiseConvolution& a, void* stream) {
  KFC_DISPATCH_HALF(a.dtype, launch_kernel<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
