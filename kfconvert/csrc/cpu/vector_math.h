// exp, tanh and the normal distribution in straight-line float code that a compiler turns into vector instructions, and
// plain double ones.
//
// Polynomials are minimax fits (Lawson iteration against double precision); measured against float64 over all
// of the float32 range: exp <= 1.5 ulp, tanh <= 2 ulp, GELU 1.2e-7 |x| (tests/ops/test_activations.py checks them).
#pragma once

#include <cstdint>
#include <cstring>

#include "../common/activation.h"

namespace {

KFC_FN float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

KFC_FN uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

KFC_FN float magnitude_of(float x) { return float_from_bits(bits_from_float(x) & 0x7fffffffu); }

// The smaller of two numbers that are not negative; if one is a NaN, the other. To compare them as integers takes one
// instruction; a comparison of floats that lets a NaN through takes several.
KFC_FN float at_most(float magnitude, float bound) {
  const int32_t a = static_cast<int32_t>(bits_from_float(magnitude));
  const int32_t b = static_cast<int32_t>(bits_from_float(bound));
  return float_from_bits(static_cast<uint32_t>(a < b ? a : b));
}

// x, or `limit` with the sign of x where |x| is larger; a NaN stays a NaN. The bound is computed with its sign: for two
// constant bounds the compiler would make two paths, each with a copy of all that follows.
KFC_FN float within(float x, float limit) {
  const float bound = float_from_bits(bits_from_float(limit) | (bits_from_float(x) & 0x80000000u));
  return magnitude_of(x) > limit ? bound : x;
}

template <class A>
struct Math;

template <>
struct Math<float> {
  KFC_FN float divide(float a, float b) { return a / b; }

  // x = n ln 2 + r with n = round(x / ln 2), |r| <= ln(2) / 2
  struct Reduced {
    uint32_t n;    // in the low 22 bits
    float growth;  // exp(r) - 1 = r + r^2 P(r)
  };

  KFC_FN Reduced reduce(float x) {
    // Adding 1.5 * 2^23 rounds to an integer, which then is in the low bits: no conversion that a NaN would
    // break.
    const float shifted = x * 1.44269504f + kRounder;
    const float n = shifted - kRounder;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
    float p = 1.9790824e-4f;
    p = p * r + 1.3944759e-3f;
    p = p * r + 8.333498e-3f;
    p = p * r + 4.1666295e-2f;
    p = p * r + 1.6666666e-1f;
    p = p * r + 0.5f;
    return {bits_from_float(shifted), p * r * r + r};
  }

  // 2^n of the low bits of n
  KFC_FN float power_of_two(uint32_t n) { return float_from_bits((n << 23) + kOne); }

  KFC_FN float exp(float x) {
    const Reduced reduced = reduce(within(x, 104.0f));  // beyond, the result is 0 or inf in float32
    // 2^n in two factors, since n reaches from -150 (subnormal results) to 150 (overflow).
    const int32_t n = static_cast<int32_t>(reduced.n - bits_from_float(kRounder));
    const int32_t half = n >> 1;
    const float scale1 = power_of_two(static_cast<uint32_t>(half));
    const float scale2 = power_of_two(static_cast<uint32_t>(n - half));
    return (reduced.growth * scale1 + scale1) * scale2;
  }

  // exp(x) for -87 <= x <= 88, where it is a normal number: half the instructions.
  KFC_FN float exp_bounded(float x) {
    const Reduced reduced = reduce(x);
    const float scale = power_of_two(reduced.n);
    return reduced.growth * scale + scale;
  }

  // exp(x) for x <= 88; 0 where it is not a normal number any more.
  KFC_FN float exp_or_zero(float x) { return x < -87.0f ? 0.0f : exp_bounded(x); }

  // |x| < 0.625: x + x^3 P(x^2); else 1 - 2 / (exp(2 |x|) + 1), which is 1 in float32 from |x| = 10 on.
  KFC_FN float tanh(float x) {
    const float magnitude = magnitude_of(x);
    const float z = x * x;
    float p = -5.717037e-3f;
    p = p * z + 2.0650579e-2f;
    p = p * z - 5.3743497e-2f;
    p = p * z + 1.3331491e-1f;
    p = p * z - 3.3333284e-1f;
    const float inner = x + x * z * p;
    const float tail = 1.0f - 2.0f / (exp_bounded(2.0f * at_most(magnitude, 10.0f)) + 1.0f);
    const float outer = float_from_bits(bits_from_float(tail) | (bits_from_float(x) & 0x80000000u));
    return magnitude >= 0.625f ? outer : inner;  // a NaN takes the inner branch and stays a NaN
  }

 private:
  static constexpr float kRounder = 12582912.0f;
  static constexpr uint32_t kOne = 0x3f800000u;
};

template <>
struct Math<double> {
  KFC_FN double exp(double x) { return __builtin_exp(x); }
  KFC_FN double exp_or_zero(double x) { return exp(x); }
  KFC_FN double tanh(double x) { return __builtin_tanh(x); }
  KFC_FN double one_plus_erf(double x) { return 1.0 + __builtin_erf(x); }
  KFC_FN double divide(double a, double b) { return a / b; }
};

// |v| < 1: cdf(v) = 1 / 2 + v P(v^2); else cdf(-y) = exp(-y^2 / 2) T(y - 2.5) for y = |v|, which shares its exponential
// with the density; T is erfcx(y / sqrt(2)) / 2, exact to 2e-8 up to y = 2.5, and less exact from there to y = 5, as
// the exponential falls; beyond 5 the product is too small to count beside 1.
template <>
struct Cheaper<Math<float>, float> : AsWritten<Math<float>, float> {
  KFC_FN float within(float v, float limit) { return ::within(v, limit); }
  KFC_FN float at_most(float magnitude, float bound) { return ::at_most(magnitude, bound); }
  KFC_FN float exp_bounded(float x) { return Math<float>::exp_bounded(x); }

  KFC_FN Normal<float> normal(float v) {
    const float magnitude = magnitude_of(v);
    const float z = v * v;
    float p = -6.64486114e-6f;
    p = p * z + 1.10327463e-4f;
    p = p * z - 0.00118270962f;
    p = p * z + 0.00997150079f;
    p = p * z - 0.0664899855f;
    p = p * z + 0.398942259f;
    const float inner = v * p + 0.5f;
    const float u = ::at_most(magnitude, 5.0f) - 2.5f;
    float t = 1.67552240e-7f;
    t = t * u - 9.74272646e-7f;
    t = t * u + 3.24993251e-6f;
    t = t * u - 1.37689570e-5f;
    t = t * u + 6.23984003e-5f;
    t = t * u - 2.58238691e-4f;
    t = t * u + 0.00101746559f;
    t = t * u - 0.00383082074f;
    t = t * u + 0.0136482804f;
    t = t * u - 0.0456139772f;
    t = t * u + 0.141331329f;
    const float density = Math<float>::exp_or_zero(-0.5f * z);
    const float tail = density * t;
    const float outer = v < 0.0f ? tail : 1.0f - tail;
    return {magnitude < 1.0f ? inner : outer, density};
  }
};

}  // namespace
