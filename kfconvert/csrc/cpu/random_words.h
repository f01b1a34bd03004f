// The words of common/philox.h for a whole block of elements.
#pragma once

#include "../common/philox.h"
#include "vectors.h"

namespace {

#if defined(__AVX2__)

// Several counters at a time: a 32-bit word in the lower half of each 64-bit lane, beside anything in the upper half.
// The processor's product of 32-bit words takes them in this form; for a loop over plain words the compiler would use
// products of 64-bit words, which take three times as long. Halves are moved by shuffles, because shuffles have an
// execution port of their own, while shifts share one with the products.
using Lanes = Vector<uint64_t>;
constexpr int kLanes = kWidth<uint64_t>;

// The 64 bits of a lane's word times b.
KFC_FN Lanes multiply_words(Lanes a, uint32_t b) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#else
  return (Lanes)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#endif
}

// The upper word of each lane in its lower half.
KFC_FN Lanes upper_words(Lanes v) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_maskz_movehdup_ps(0xffff, (__m512)v);
#else
  return (Lanes)_mm256_movehdup_ps((__m256)v);
#endif
}

// The lower words of both, those of `low` in the lower halves.
KFC_FN Lanes join_words(Lanes low, Lanes high) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_mask_moveldup_ps((__m512)low, 0xaaaa, (__m512)high);
#else
  return (Lanes)_mm256_blend_ps((__m256)low, _mm256_moveldup_ps((__m256)high), 0xaa);
#endif
}

// to = a[0], b[0], a[1], b[1] and so on
KFC_FN void store_in_turn(Lanes a, Lanes b, uint32_t* to) {
#if defined(__AVX512F__)
  const __m512i first = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0);
  const __m512i second = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
  _mm512_storeu_si512(to, _mm512_permutex2var_epi64((__m512i)a, first, (__m512i)b));
  _mm512_storeu_si512(to + 16, _mm512_permutex2var_epi64((__m512i)a, second, (__m512i)b));
#else
  const __m256i even = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
  const __m256i odd = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
  _mm256_storeu_si256((__m256i*)to, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256((__m256i*)(to + 8), _mm256_permute2x128_si256(even, odd, 0x31));
#endif
}

// Words 4 first to 4 first + kBlock - 1 of sequence number `sequence` of `seed`.
KFC_ROW void random_words(uint64_t seed, uint64_t sequence, uint64_t first, uint32_t* words) {
  // The keys are kept in memory, from where instructions take them as operands: there are not enough registers for all.
  alignas(64) Lanes keys[2][kPhiloxRounds];
  PhiloxKey key = philox_key(seed);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int k = 0; k < 2; ++k) keys[k][round] = Lanes{} + uint64_t{key.v[k]};
    key = philox_next(key);
  }
  Lanes block;
  for (int lane = 0; lane < kLanes; ++lane) block[lane] = first + static_cast<uint64_t>(lane);
  for (int64_t i = 0; i < kBlock; i += 4 * kLanes) {
    Lanes c[4] = {block, block >> 32, Lanes{} + sequence, Lanes{} + (sequence >> 32)};
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const Lanes first_product = multiply_words(c[0], kPhiloxFirst);
      const Lanes second_product = multiply_words(c[2], kPhiloxSecond);
      c[0] = upper_words(second_product) ^ c[1] ^ keys[0][round];
      c[1] = second_product;
      c[2] = upper_words(first_product) ^ c[3] ^ keys[1][round];
      c[3] = first_product;
    }
    store_in_turn(join_words(c[0], c[1]), join_words(c[2], c[3]), words + i);
    block += uint64_t{kLanes};
  }
}

#else

// One round after the other, each for all blocks: as loops over arrays the rounds become vector instructions.
KFC_ROW void random_words(uint64_t seed, uint64_t sequence, uint64_t first, uint32_t* words) {
  constexpr int64_t blocks = kBlock / 4;
  alignas(64) uint32_t c[4][blocks];
  for (int64_t i = 0; i < blocks; ++i) {
    const Words start = philox_counter(sequence, first + static_cast<uint64_t>(i));
    for (int j = 0; j < 4; ++j) c[j][i] = start.v[j];
  }
  PhiloxKey key = philox_key(seed);
  for (int round = 0; round < kPhiloxRounds; ++round) {
#pragma omp simd
    for (int64_t i = 0; i < blocks; ++i) {
      const Words next = philox_round(key, Words{{c[0][i], c[1][i], c[2][i], c[3][i]}});
      c[0][i] = next.v[0];
      c[1][i] = next.v[1];
      c[2][i] = next.v[2];
      c[3][i] = next.v[3];
    }
    key = philox_next(key);
  }
#pragma omp simd
  for (int64_t i = 0; i < blocks; ++i) {
    words[4 * i] = c[0][i];
    words[4 * i + 1] = c[1][i];
    words[4 * i + 2] = c[2][i];
    words[4 * i + 3] = c[3][i];
  }
}

#endif

}  // namespace
