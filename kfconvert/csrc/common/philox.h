// Random words by counter, the same on CPU and CUDA: Philox 4x32-7 (Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", 2011, where it passes every test with these seven rounds; ten have a margin).
#pragma once

#include <cstdint>

#include "activation.h"

namespace {

struct Words {
  uint32_t v[4];
};

struct PhiloxKey {
  uint32_t v[2];
};

constexpr int kPhiloxRounds = 7;
constexpr uint32_t kPhiloxFirst = 0xD2511F53u;
constexpr uint32_t kPhiloxSecond = 0xCD9E8D57u;

KFC_FN PhiloxKey philox_key(uint64_t seed) {
  return {{static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)}};
}

KFC_FN PhiloxKey philox_next(PhiloxKey key) { return {{key.v[0] + 0x9E3779B9u, key.v[1] + 0xBB67AE85u}}; }

KFC_FN Words philox_counter(uint64_t sequence, uint64_t block) {
  return {{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), static_cast<uint32_t>(sequence),
           static_cast<uint32_t>(sequence >> 32)}};
}

KFC_FN Words philox_round(PhiloxKey key, Words c) {
  const uint64_t first = uint64_t{kPhiloxFirst} * c.v[0];
  const uint64_t second = uint64_t{kPhiloxSecond} * c.v[2];
  return {{static_cast<uint32_t>(second >> 32) ^ c.v[1] ^ key.v[0], static_cast<uint32_t>(second),
           static_cast<uint32_t>(first >> 32) ^ c.v[3] ^ key.v[1], static_cast<uint32_t>(first)}};
}

// Words 4 block to 4 block + 3 of sequence number `sequence` of `seed`.
KFC_FN Words philox(uint64_t seed, uint64_t sequence, uint64_t block) {
  PhiloxKey key = philox_key(seed);
  Words c = philox_counter(sequence, block);
#ifdef __CUDACC__
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    c = philox_round(key, c);
    key = philox_next(key);
  }
  return c;
}

}  // namespace
