// y = image * scale + shift with scale = 1 / (255 std) and shift = -mean / std: pixels of bytes to planes or pixels of
// real numbers, one pass over memory. Built once for each instruction set.
#include "convert.h"
#include "kernels.h"

namespace {

template <class A>
struct Coefficients {
  A scale;
  A shift;
  Coefficients(const kfc::NormalizeImage& a, int64_t channel) {
    const bool tensors = a.mean != nullptr;
    const double mean = tensors ? static_cast<const A*>(a.mean)[channel] : a.mean_values[channel];
    const double deviation = tensors ? static_cast<const A*>(a.deviation)[channel] : a.deviation_values[channel];
    scale = static_cast<A>(1 / (255 * deviation));
    shift = static_cast<A>(-mean / deviation);
  }
};

// Pixels from number `pixel` on that have one stride: up to the end of their row, `end` or `most`.
struct Pixels {
  const uint8_t* x;
  int64_t image;
  int64_t n;
  Pixels(const kfc::NormalizeImage& a, int64_t pixel, int64_t end, int64_t most) {
    const int64_t row = pixel / a.sizes[2];
    const int64_t column = pixel % a.sizes[2];
    image = row / a.sizes[1];
    x = a.image + image * a.strides[0] + row % a.sizes[1] * a.strides[1] + column * a.strides[2];
    n = a.sizes[2] - column;
    n = n < end - pixel ? n : end - pixel;
    n = n < most ? n : most;
  }
};

// y[i] = x[i] * scale + shift
template <class A>
KFC_ROW void scale_row(const uint8_t* __restrict x, A* __restrict y, A scale, A shift, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<A>(x[i]) * scale + shift;
}

// y[i] = x[i] * scale[i] + shift[i]
template <class A>
KFC_ROW void scale_each(const uint8_t* __restrict x, A* __restrict y, const A* __restrict scale,
                        const A* __restrict shift, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) y[i] = static_cast<A>(x[i]) * scale[i] + shift[i];
}

// bytes[c][i] = x[3 i + c]
KFC_ROW void take_colours_apart(const uint8_t* __restrict x, uint8_t (*__restrict bytes)[kBlock], int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    bytes[0][i] = x[3 * i];
    bytes[1][i] = x[3 * i + 1];
    bytes[2][i] = x[3 * i + 2];
  }
}

template <class T>
void to_planes(const kfc::NormalizeImage& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const int64_t plane = a.sizes[1] * a.sizes[2];
  const bool colours = a.channels == 3 && a.strides[2] == 3 && a.channel_stride == 1;
  alignas(64) uint8_t bytes[3][kBlock];
  alignas(64) A scratch[kBlock];
  for (int64_t pixel = begin; pixel < end;) {
    const Pixels from(a, pixel, end, kBlock);
    if (colours) take_colours_apart(from.x, bytes, from.n);
    T* y = static_cast<T*>(a.y) + from.image * (a.channels - 1) * plane + pixel;
    for (int64_t channel = 0; channel < a.channels; ++channel, y += plane) {
      const uint8_t* x = from.x + channel * a.channel_stride;
      if (colours) {
        x = bytes[channel];
      } else if (a.strides[2] != 1) {
        for (int64_t i = 0; i < from.n; ++i) bytes[0][i] = x[i * a.strides[2]];
        x = bytes[0];
      }
      const Coefficients<A> by(a, channel);
      A* row = result_row(y, scratch);
      scale_row(x, row, by.scale, by.shift, from.n);
      store_result(row, y, from.n);
    }
    pixel += from.n;
  }
}

template <class T>
void to_pixels(const kfc::NormalizeImage& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const bool together = a.strides[2] == a.channels && a.channel_stride == 1;
  alignas(64) uint8_t bytes[kBlock];
  alignas(64) A scratch[kBlock];
  alignas(64) A scale[kBlock];
  alignas(64) A shift[kBlock];
  // Whole pixels, whose coefficients stand one after the other, or a part of one at a time.
  int64_t most = a.channels <= kBlock ? kBlock / a.channels : 1;
  if (most > 16) most -= most % 16;  // whole vectors
  if (most > end - begin) most = end - begin;
  for (int64_t first = 0; first < a.channels; first += kBlock) {
    const int64_t channels = a.channels - first < kBlock ? a.channels - first : kBlock;
    for (int64_t i = 0; i < channels; ++i) {
      const Coefficients<A> by(a, first + i);
      scale[i] = by.scale;
      shift[i] = by.shift;
    }
    for (int64_t i = channels; i < most * channels; ++i) {
      scale[i] = scale[i - channels];
      shift[i] = shift[i - channels];
    }
    for (int64_t pixel = begin; pixel < end;) {
      const Pixels from(a, pixel, end, most);
      const uint8_t* x = from.x + first * a.channel_stride;
      const int64_t n = from.n * channels;
      if (!together) {
        for (int64_t i = 0; i < from.n; ++i) {
          const uint8_t* own = x + i * a.strides[2];
          for (int64_t c = 0; c < channels; ++c) bytes[i * channels + c] = own[c * a.channel_stride];
        }
        x = bytes;
      }
      T* y = static_cast<T*>(a.y) + pixel * a.channels + first;
      A* row = result_row(y, scratch);
      scale_each(x, row, scale, shift, n);
      store_result(row, y, n);
      pixel += from.n;
    }
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(normalize_image)(const NormalizeImage& a, int64_t begin, int64_t end) {
  if (a.channels_last) {
    KFC_DISPATCH_DTYPE(a.dtype, to_pixels<T>(a, begin, end));
  } else {
    KFC_DISPATCH_DTYPE(a.dtype, to_planes<T>(a, begin, end));
  }
}

}  // namespace kfc
