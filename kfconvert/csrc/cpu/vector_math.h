// exp, erf and tanh in straight-line float code that a compiler turns into vector instructions, and plain
// double ones.
//
// Polynomials are minimax fits (Lawson iteration against double precision); measured against float64 over all
// of the float32 range: exp <= 1.5 ulp, erf <= 1.5 ulp, tanh <= 2 ulp (tests/ops/test_activations.py checks
// them).
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

template <class A>
struct Math;

template <>
struct Math<float> {
  // exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2) / 2; exp(r) = 1 + r + r^2 P(r).
  KFC_FN float exp(float x) {
    // Beyond these bounds the result is 0 or inf in float32; the comparisons let a NaN through.
    x = x < -104.0f ? -104.0f : x;
    x = x > 89.0f ? 89.0f : x;
    // Adding 1.5 * 2^23 rounds to an integer, which then is in the low bits: no conversion that a NaN would
    // break.
    const float rounder = 12582912.0f;
    const float shifted = x * 1.44269504f + rounder;
    const float n = shifted - rounder;
    const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;  // ln 2 in two parts
    float p = 1.9790824e-4f;
    p = p * r + 1.3944759e-3f;
    p = p * r + 8.333498e-3f;
    p = p * r + 4.1666295e-2f;
    p = p * r + 1.6666666e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    // 2^n in two factors, since n reaches from -150 (subnormal results) to 128 (overflow).
    const int32_t exponent = static_cast<int32_t>(bits_from_float(shifted) - bits_from_float(rounder));
    const int32_t half = exponent >> 1;
    const float scale1 = float_from_bits(static_cast<uint32_t>(half + 127) << 23);
    const float scale2 = float_from_bits(static_cast<uint32_t>(exponent - half + 127) << 23);
    return p * scale1 * scale2;
  }

  // |x| < 0.92: x + x P(x^2); else 1 - exp(Q(|x|)) with Q = log erfc, which is 1 in float32 from |x| = 4 on.
  KFC_FN float erf(float x) {
    const float magnitude = float_from_bits(bits_from_float(x) & 0x7fffffffu);
    const float z = x * x;
    float p = 8.397802e-5f;
    p = p * z - 8.149807e-4f;
    p = p * z + 5.201716e-3f;
    p = p * z - 2.6859703e-2f;
    p = p * z + 1.1283702e-1f;
    p = p * z - 3.7612635e-1f;
    p = p * z + 1.2837917e-1f;
    const float inner = x + x * p;
    const float t = magnitude > 4.0f ? 4.0f : magnitude;
    float q = 1.9572173e-4f;
    q = q * t - 3.0411026e-3f;
    q = q * t + 2.2218486e-2f;
    q = q * t - 1.039141e-1f;
    q = q * t - 6.372022e-1f;
    q = q * t - 1.1276637f;
    q = q * t - 1.985456e-4f;
    const float tail = 1.0f - exp(q);
    const float outer = float_from_bits(bits_from_float(tail) | (bits_from_float(x) & 0x80000000u));
    return magnitude > 0.921875f ? outer : inner;  // a NaN takes the inner branch and stays a NaN
  }

  // |x| < 0.625: x + x^3 P(x^2); else 1 - 2 / (exp(2 |x|) + 1).
  KFC_FN float tanh(float x) {
    const float magnitude = float_from_bits(bits_from_float(x) & 0x7fffffffu);
    const float z = x * x;
    float p = -5.717037e-3f;
    p = p * z + 2.0650579e-2f;
    p = p * z - 5.3743497e-2f;
    p = p * z + 1.3331491e-1f;
    p = p * z - 3.3333284e-1f;
    const float inner = x + x * z * p;
    const float tail = 1.0f - 2.0f / (exp(2.0f * magnitude) + 1.0f);
    const float outer = float_from_bits(bits_from_float(tail) | (bits_from_float(x) & 0x80000000u));
    return magnitude >= 0.625f ? outer : inner;
  }

  KFC_FN float one_plus_erf(float x) { return 1.0f + erf(x); }
};

template <>
struct Math<double> {
  KFC_FN double exp(double x) { return __builtin_exp(x); }
  KFC_FN double erf(double x) { return __builtin_erf(x); }
  KFC_FN double tanh(double x) { return __builtin_tanh(x); }
  KFC_FN double one_plus_erf(double x) { return 1.0 + erf(x); }
};

}  // namespace
