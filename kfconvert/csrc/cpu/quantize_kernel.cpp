// integers = clamp(round(reals / scale + zero_point), -128, 127), and reals = (integers - zero_point) * scale: one pass
// over memory. Built once for each instruction set.
#include "channels.h"
#include "kernels.h"

namespace {

// Adding and taking away 1.5 * 2^23 (of double 1.5 * 2^52) rounds to the nearest integer, ties to even, as long as
// that is small: clamping to whole numbers first changes nothing.
template <class A>
KFC_FN int8_t to_int8(A v) {
  constexpr A rounder = sizeof(A) == 4 ? A(12582912.0) : A(6755399441055744.0);
  v = v == v ? v : A(0);
  v = v > A(-128) ? v : A(-128);
  v = v < A(127) ? v : A(127);
  return static_cast<int8_t>(static_cast<int32_t>((v + rounder) - rounder));
}

// How channels.h takes an image apart: `row` and `run` as there.
template <class A>
struct Parameters {
  using Scratch = A;
  const kfc::Quantize& a;
  explicit Parameters(const kfc::Quantize& a) : a(a) {}
  A scale(int64_t channel) const { return at(a.scale, a.scale_value, channel); }
  A zero_point(int64_t channel) const { return at(a.zero_point, a.zero_point_value, channel); }

  // Of n channels. Where there are several one of the two at least is a tensor, so that one scratch is enough for both.
  const A* scales(int64_t channel, A* scratch, int64_t n) const {
    return row_at(a.scale, a.scale_value, channel, scratch, n);
  }
  const A* zero_points(int64_t channel, A* scratch, int64_t n) const {
    return row_at(a.zero_point, a.zero_point_value, channel, scratch, n);
  }

 private:
  static A at(const void* tensor, double value, int64_t channel) {
    return tensor != nullptr ? static_cast<const A*>(tensor)[channel] : static_cast<A>(value);
  }
  static const A* row_at(const void* tensor, double value, int64_t channel, A* scratch, int64_t n) {
    if (tensor != nullptr) return static_cast<const A*>(tensor) + channel;
    for (int64_t i = 0; i < n; ++i) scratch[i] = static_cast<A>(value);
    return scratch;
  }
};

template <class A>
struct ToIntegers : Parameters<A> {
  using Parameters<A>::Parameters;
  void row(int64_t channel, const A* x, int8_t* q, A* scratch, int64_t n) const {
    const A* scale = this->scales(channel, scratch, n);
    const A* zero_point = this->zero_points(channel, scratch, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) q[i] = to_int8(x[i] / scale[i] + zero_point[i]);
  }
  void run(int64_t channel, const A* x, int8_t* q, int64_t n) const {
    const A scale = this->scale(channel);
    const A zero_point = this->zero_point(channel);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) q[i] = to_int8(x[i] / scale + zero_point);
  }
};

template <class A>
struct ToReals : Parameters<A> {
  using Parameters<A>::Parameters;
  void row(int64_t channel, const int8_t* q, A* x, A* scratch, int64_t n) const {
    const A* scale = this->scales(channel, scratch, n);
    const A* zero_point = this->zero_points(channel, scratch, n);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = (static_cast<A>(q[i]) - zero_point[i]) * scale[i];
  }
  void run(int64_t channel, const int8_t* q, A* x, int64_t n) const {
    const A scale = this->scale(channel);
    const A zero_point = this->zero_point(channel);
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) x[i] = (static_cast<A>(q[i]) - zero_point) * scale;
  }
};

// Where all channels are alike the elements are one run.
template <class Direction, class X, class V>
void convert_block(const kfc::Quantize& a, int64_t begin, const X* x, V* v, int64_t n) {
  if (a.channels == 1) return Direction(a).run(0, x, v, n);
  apply_channels<Direction>(a, begin, x, v, n);
}

template <class T>
void quantize_range(const kfc::Quantize& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  alignas(64) A scratch[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    const A* x = as_accumulator(static_cast<const T*>(a.reals) + i, scratch, n);
    convert_block<ToIntegers<A>>(a, i, x, a.integers + i, n);
  }
}

template <class T>
void dequantize_range(const kfc::Quantize& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  T* reals = static_cast<T*>(a.reals);
  alignas(64) A scratch[kBlock];
  for (int64_t i = begin; i < end; i += kBlock) {
    const int64_t n = end - i < kBlock ? end - i : kBlock;
    A* x = result_row(reals + i, scratch);
    convert_block<ToReals<A>>(a, i, static_cast<const int8_t*>(a.integers + i), x, n);
    store_result(x, reals + i, n);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(quantize)(const Quantize& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, quantize_range<T>(a, begin, end));
}

void KFC_FOR_CAPABILITY(dequantize)(const Quantize& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, dequantize_range<T>(a, begin, end));
}

}  // namespace kfc
