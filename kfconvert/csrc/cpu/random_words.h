// The words of common/philox.h for a whole block of elements.
#pragma once

#include "../common/philox.h"
#include "convert.h"

namespace {

#if defined(__AVX2__)

// Several counters at a time: a 32-bit word in the lower half of each 64-bit lane, beside anything in the upper half.
// So the processor's product of 32-bit words takes them as they are; of a loop over plain words the compiler makes
// products of 64-bit words, which take three times as long.
#if defined(__AVX512F__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef uint64_t Lanes __attribute__((vector_size(8 * kLanes)));

// The 64 bits of a lane's word times b.
KFC_FN Lanes multiply_words(Lanes a, uint32_t b) {
#if defined(__AVX512F__)
  return (Lanes)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#else
  return (Lanes)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#endif
}

// Words 4 first to 4 first + kBlock - 1 of sequence number `sequence` of `seed`.
KFC_ROW void random_words(uint64_t seed, uint64_t sequence, uint64_t first, uint32_t* words) {
  constexpr int64_t blocks = kBlock / 4;
  alignas(64) uint64_t pairs[2][blocks];
  Lanes block;
  for (int lane = 0; lane < kLanes; ++lane) block[lane] = first + static_cast<uint64_t>(lane);
  for (int64_t i = 0; i < blocks; i += kLanes) {
    Lanes c[4] = {block, block >> 32, Lanes{} + sequence, Lanes{} + (sequence >> 32)};
    PhiloxKey key = philox_key(seed);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      const Lanes first_product = multiply_words(c[0], kPhiloxFirst);
      const Lanes second_product = multiply_words(c[2], kPhiloxSecond);
      c[0] = (second_product >> 32) ^ c[1] ^ uint64_t{key.v[0]};
      c[1] = second_product;
      c[2] = (first_product >> 32) ^ c[3] ^ uint64_t{key.v[1]};
      c[3] = first_product;
      key = philox_next(key);
    }
    for (int pair = 0; pair < 2; ++pair) {
      const Lanes both = (c[2 * pair] & 0xffffffffu) | (c[2 * pair + 1] << 32);
      std::memcpy(pairs[pair] + i, &both, sizeof(both));
    }
    block += uint64_t{kLanes};
  }
#pragma omp simd
  for (int64_t i = 0; i < blocks; ++i) {
    words[4 * i] = static_cast<uint32_t>(pairs[0][i]);
    words[4 * i + 1] = static_cast<uint32_t>(pairs[0][i] >> 32);
    words[4 * i + 2] = static_cast<uint32_t>(pairs[1][i]);
    words[4 * i + 3] = static_cast<uint32_t>(pairs[1][i] >> 32);
  }
}

#else

// A round for all blocks after the other: as loops over arrays the rounds become vector instructions.
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
