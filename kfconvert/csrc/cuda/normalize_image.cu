// y = image * scale + shift, with scale = 1 / (255 std) and shift = -mean / std of the channel
//   image: (images, height, width, channels), bytes in any strides;  mean, std: (channels)
//   y: (images, channels, height, width), or with channels_last (images, height, width, channels)
//
// Limited by memory bandwidth. Where the pixels of a row lie side by side and its ends are aligned, a thread writes
// packs of 16 bytes: one of each plane, from so many pixels of 3 or 4 channels, or one of pixels of 1, 3 or 4 channels.
// For all else there is one kernel with an element a thread. fma by name: a compiler that chose it in one kernel and
// not in the other would make results depend on the layout.
#include "elementwise.cuh"
#include "kernels.h"

namespace kfc {
namespace {

// Scale and shift of each channel: made on the host of numbers, by each thread of tensors.
template <class A>
struct Coefficients {
  const A* mean;
  const A* deviation;
  A scale[kFewChannels];
  A shift[kFewChannels];

  explicit Coefficients(const NormalizeImage& a)
      : mean(static_cast<const A*>(a.mean)), deviation(static_cast<const A*>(a.deviation)), scale{}, shift{} {
    for (int64_t c = 0; mean == nullptr && c < a.channels; ++c) {
      scale[c] = static_cast<A>(1 / (255 * a.deviation_values[c]));
      shift[c] = static_cast<A>(-a.mean_values[c] / a.deviation_values[c]);
    }
  }

  __device__ __forceinline__ A scale_of(int64_t channel) const {
    return mean == nullptr ? scale[channel] : A(1) / (A(255) * deviation[channel]);
  }
  __device__ __forceinline__ A shift_of(int64_t channel) const {
    return mean == nullptr ? shift[channel] : -mean[channel] / deviation[channel];
  }

  template <int C>
  __device__ __forceinline__ void get(A (&scales)[C], A (&shifts)[C]) const {
#pragma unroll
    for (int c = 0; c < C; ++c) {
      scales[c] = scale_of(c);
      shifts[c] = shift_of(c);
    }
  }
};

template <class T>
using CoefficientsFor = Coefficients<typename Accumulate<T>::type>;

template <class T>
constexpr int kPack = kPackBytes / static_cast<int>(sizeof(T));

// The first byte of row `row` of image `image`.
__device__ __forceinline__ const uint8_t* row_begin(const NormalizeImage& a, int64_t image, int64_t row) {
  return a.image + image * a.strides[0] + row * a.strides[1];
}

// Packs of N pixels, which are C packs of N bytes, to a pack of each plane. columns: pixels of a row.
template <class T, int C>
__global__ void __launch_bounds__(kThreads)
    planes_kernel(NormalizeImage a, CoefficientsFor<T> by, Divider32 columns, Divider32 height) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  constexpr int N = kPack<T>;
  A scale[C];
  A shift[C];
  by.get(scale, shift);
  const int64_t plane = a.sizes[1] * a.sizes[2];
  const uint32_t packs = static_cast<uint32_t>(a.sizes[0] * plane / N);
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < packs; i += step) {
    const uint32_t pixel = i * N;
    const uint32_t row = columns.divide(pixel);
    const uint32_t image = height.divide(row);
    const uint8_t* from = row_begin(a, image, height.remainder(row)) + int64_t{C} * columns.remainder(pixel);
    Pack<uint8_t, N> bytes[C];
#pragma unroll
    for (int c = 0; c < C; ++c) bytes[c] = load_pack<Pack<uint8_t, N>>(from + c * N);
    T* to = static_cast<T*>(a.y) + int64_t{C - 1} * image * plane + pixel;
#pragma unroll
    for (int c = 0; c < C; ++c) {
      A v[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const int at = j * C + c;
        v[j] = fma(static_cast<A>(bytes[at / N].v[at % N]), scale[c], shift[c]);
      }
      store<N>(to + c * plane, v);
    }
  }
}

// Packs of N elements to packs of N elements. columns: elements of a row.
template <class T, int C>
__global__ void __launch_bounds__(kThreads)
    pixels_kernel(NormalizeImage a, CoefficientsFor<T> by, Divider32 columns, Divider32 height) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  constexpr int N = kPack<T>;
  constexpr int kTurns = N % C == 0 ? 1 : C;  // channels that a pack may begin with
  A scale[C];
  A shift[C];
  by.get(scale, shift);
  const uint32_t packs = static_cast<uint32_t>(a.sizes[0] * a.sizes[1] * columns.divisor / N);
  const uint32_t step = gridDim.x * kThreads;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < packs; i += step) {
    const uint32_t at = i * N;
    const uint32_t row = columns.divide(at);
    const uint8_t* from = row_begin(a, height.divide(row), height.remainder(row)) + columns.remainder(at);
    const auto bytes = load_pack<Pack<uint8_t, N>>(from);
    A v[N];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      if (at % kTurns != turn) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        v[j] = fma(static_cast<A>(bytes.v[j]), scale[(turn + j) % C], shift[(turn + j) % C]);
      }
    }
    store<N>(static_cast<T*>(a.y) + at, v);
  }
}

// Any strides, any number of channels: elements in the order of the result. __grid_constant__: of other arguments a
// thread makes a copy of its own where it looks them up by an index.
template <class T, class Index, class Divider>
__global__ void __launch_bounds__(kThreads)
    elements_kernel(NormalizeImage a, const __grid_constant__ CoefficientsFor<T> by, Divider width, Divider height,
                    Divider channels) {
  wait_for_previous_kernel();
  using A = typename Accumulate<T>::type;
  const Index numel = static_cast<Index>(a.sizes[0] * a.sizes[1] * a.sizes[2] * a.channels);
  const Index step = static_cast<Index>(gridDim.x) * kThreads;
  for (Index i = static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x; i < numel; i += step) {
    Index rest = i;
    const auto innermost = [&rest](const Divider& size) {
      const Index within = size.remainder(rest);
      rest = size.divide(rest);
      return static_cast<int64_t>(within);
    };
    int64_t channel = 0;
    if (a.channels_last) channel = innermost(channels);
    const int64_t column = innermost(width);
    const int64_t row = innermost(height);
    if (!a.channels_last) channel = innermost(channels);
    const uint8_t* from = row_begin(a, rest, row) + column * a.strides[2] + channel * a.channel_stride;
    const A v = fma(static_cast<A>(*from), by.scale_of(channel), by.shift_of(channel));
    static_cast<T*>(a.y)[i] = narrow<T>(v);
  }
}

// Whether packs of n bytes make up the rows, `columns` bytes or pixels long, and are aligned.
bool fits_packs(const NormalizeImage& a, int64_t columns, int n) {
  const auto even = [n](int64_t step, int64_t steps) { return steps == 1 || step % n == 0; };
  return a.channel_stride == 1 && a.strides[2] == a.channels && columns % n == 0 && aligned(a.y) &&
         reinterpret_cast<uintptr_t>(a.image) % n == 0 && even(a.strides[0], a.sizes[0]) &&
         even(a.strides[1], a.sizes[1]);
}

// Returns whether there is a kernel.
template <class T>
bool launch_packs(const NormalizeImage& a, cudaStream_t stream) {
  constexpr int N = kPack<T>;
  const int64_t columns = a.channels_last ? a.sizes[2] * a.channels : a.sizes[2];
  if (!fits_packs(a, columns, N)) return false;
  void (*kernel)(NormalizeImage, CoefficientsFor<T>, Divider32, Divider32) = nullptr;
  if (a.channels == 1) kernel = pixels_kernel<T, 1>;
  if (a.channels == 3) kernel = a.channels_last ? pixels_kernel<T, 3> : planes_kernel<T, 3>;
  if (a.channels == 4) kernel = a.channels_last ? pixels_kernel<T, 4> : planes_kernel<T, 4>;
  if (kernel == nullptr) return false;
  const dim3 grid = elementwise_grid(a.sizes[0] * a.sizes[1] * columns / N);
  launch_overlapped(kernel, grid, kThreads, stream, a, CoefficientsFor<T>(a), Divider32(columns),
                    Divider32(a.sizes[1]));
  return true;
}

template <class T, class Index, class Divider>
void launch_elements(const NormalizeImage& a, int64_t numel, cudaStream_t stream) {
  const CoefficientsFor<T> by(a);
  launch_overlapped(elements_kernel<T, Index, Divider>, elementwise_grid(numel), kThreads, stream, a, by,
                    Divider(a.sizes[2]), Divider(a.sizes[1]), Divider(a.channels));
}

template <class T>
void launch(const NormalizeImage& a, cudaStream_t stream) {
  const int64_t numel = a.sizes[0] * a.sizes[1] * a.sizes[2] * a.channels;
  // float64 is a reference type: one kernel is enough.
  if constexpr (sizeof(T) < 8) {
    if (numel <= kMostElements) {
      if (!launch_packs<T>(a, stream)) launch_elements<T, uint32_t, Divider32>(a, numel, stream);
      return;
    }
  }
  launch_elements<T, uint64_t, Divider64>(a, numel, stream);
}

}  // namespace

int launch_normalize_image(const NormalizeImage& a, void* stream) {
  KFC_DISPATCH_DTYPE(a.dtype, launch<T>(a, static_cast<cudaStream_t>(stream)));
  return cudaGetLastError();
}

}  // namespace kfc
