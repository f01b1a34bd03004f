// float16 and bfloat16 as bare 16-bit words, and rows of them to and from the accumulation type.
// These are types of our own, not torch's: a file built for AVX-512 must not hold inline functions that the linker
// could give to other files as well.
#pragma once

#include "vector_math.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

// Row functions are not inlined: a call costs little beside its hundreds of elements, and the build is several times
// faster.
#define KFC_ROW static __attribute__((noinline))

namespace {

// Rows are taken in blocks that live in the first-level cache: 4 kB of float or 8 kB of double for each operand.
constexpr int64_t kBlock = 1024;

struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

template <class T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};

KFC_FN float to_float(BFloat16 h) { return float_from_bits(static_cast<uint32_t>(h.bits) << 16); }

KFC_FN BFloat16 to_bfloat16(float f) {
  const uint32_t bits = bits_from_float(f);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
  return {static_cast<uint16_t>(f != f ? 0x7fc0u : rounded)};
}

#if defined(__F16C__)
KFC_FN float to_float(Float16 h) { return _cvtsh_ss(h.bits); }
KFC_FN Float16 to_float16(float f) { return {static_cast<uint16_t>(_cvtss_sh(f, _MM_FROUND_TO_NEAREST_INT))}; }
#else
KFC_FN float to_float(Float16 h) {
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  const uint32_t payload = h.bits & 0x7fffu;
  // Shifted into place the exponent is 112 too small, which one product by 2^112 mends, subnormals included.
  const float magnitude = float_from_bits(payload << 13) * 5.192296858534828e33f;
  const uint32_t bits = payload >= 0x7c00u ? (payload << 13) | 0x7f800000u : bits_from_float(magnitude);
  return float_from_bits(bits | sign);
}
KFC_FN Float16 to_float16(float f) {
  const uint32_t bits = bits_from_float(f);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude >= 0x7f800001u) {
    half = 0x7e00u;  // NaN
  } else if (magnitude >= 0x477ff000u) {
    half = 0x7c00u;  // rounds to infinity
  } else if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the low bits.
    half = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(half | sign)};
}
#endif

// to[i] = from[i]
template <class T, class A>
KFC_ROW void load_row(const T* __restrict from, A* __restrict to, int64_t n) {
  int64_t i = 0;
  if constexpr (sizeof(T) >= 4) {
    for (; i < n; ++i) to[i] = static_cast<A>(from[i]);
  } else {
#if defined(__AVX512F__)
    if constexpr (__is_same(T, Float16)) {
      for (; i + 16 <= n; i += 16) {
        const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        _mm512_storeu_ps(to + i, _mm512_cvtph_ps(h));
      }
    }
#elif defined(__F16C__)
    if constexpr (__is_same(T, Float16)) {
      for (; i + 8 <= n; i += 8) {
        const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(h));
      }
    }
#endif
    for (; i < n; ++i) to[i] = to_float(from[i]);
  }
}

// to[i] = from[i], rounded
template <class T, class A>
KFC_ROW void store_row(const A* __restrict from, T* __restrict to, int64_t n) {
  int64_t i = 0;
  if constexpr (sizeof(T) >= 4) {
    for (; i < n; ++i) to[i] = static_cast<T>(from[i]);
  } else if constexpr (__is_same(T, BFloat16)) {
    for (; i < n; ++i) to[i] = to_bfloat16(from[i]);
  } else {
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) {
      const __m256i h = _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), h);
    }
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) {
      const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), h);
    }
#endif
    for (; i < n; ++i) to[i] = to_float16(from[i]);
  }
}

// The loops below may run in place (out == v), element by element: "omp simd" tells the compiler so.

// out[i] = act(v[i])
template <Act act, class A>
KFC_FN void activate_each(const A* v, A* out, int64_t n, A slope) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = activate<act, Math<A>>(v[i], slope);
}

template <class A>
KFC_ROW void activate_row(int code, const A* v, A* out, int64_t n, A slope) {
  if (code == kNone && v == out) return;
  KFC_DISPATCH_ACTIVATION(code, (activate_each<act>(v, out, n, slope)));
}

// out[i] = g[i] * act'(v[i]); v as Activation.saves_output says
template <Act act, class A>
KFC_FN void activate_backward_each(const A* g, const A* v, A* out, int64_t n, A slope) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = activate_backward<act, Math<A>>(g[i], v[i], slope);
}

template <class A>
KFC_ROW void activate_backward_row(int code, const A* g, const A* v, A* out, int64_t n, A slope) {
  KFC_DISPATCH_ACTIVATION(code, (activate_backward_each<act>(g, v, out, n, slope)));
}

// out[i] = g[i] * act'(v[i]) where v is the input of every activation
template <Act act, class A>
KFC_FN void activate_backward_from_input_each(const A* g, const A* v, A* out, int64_t n, A slope) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = activate_backward_from_input<act, Math<A>>(g[i], v[i], slope);
}

template <class A>
KFC_ROW void activate_backward_from_input_row(int code, const A* g, const A* v, A* out, int64_t n, A slope) {
  if (code == kNone && g == out) return;
  KFC_DISPATCH_ACTIVATION(code, (activate_backward_from_input_each<act>(g, v, out, n, slope)));
}

// A row in the accumulation type: the data themselves for float and double, a converted copy for the half
// types.
template <class T, class A>
KFC_FN const A* as_accumulator(const T* from, A* scratch, int64_t n) {
  if constexpr (__is_same(T, A)) {
    return from;
  } else {
    load_row(from, scratch, n);
    return scratch;
  }
}

// Where a result row is computed: in place for float and double, in scratch (for store_row) for the half
// types.
template <class T, class A>
KFC_FN A* result_row(T* to, A* scratch) {
  if constexpr (__is_same(T, A)) {
    return to;
  } else {
    return scratch;
  }
}

// Rounds a row that was computed in result_row(to, ...) into `to`, unless it was computed there.
template <class T, class A>
KFC_FN void store_result(const A* row, T* to, int64_t n) {
  if constexpr (!__is_same(T, A)) store_row(row, to, n);
}

// Calls the code with T as the type of a dtype.
#define KFC_DISPATCH_DTYPE(DTYPE, ...) \
  switch (DTYPE) {                     \
    case kfc::DType::f32: {            \
      using T = float;                 \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case kfc::DType::f64: {            \
      using T = double;                \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case kfc::DType::f16: {            \
      using T = Float16;               \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case kfc::DType::bf16: {           \
      using T = BFloat16;              \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
  }

// out[i] = a[i] * b[i]
template <class A>
KFC_FN void multiply_rows(const A* a, const A* b, A* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] * b[i];
}

// out[i] = a[i] + b[i]
template <class A>
KFC_FN void add_rows(const A* a, const A* b, A* out, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

}  // namespace
