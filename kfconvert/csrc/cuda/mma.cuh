// Products of small matrices on tensor cores, by single instructions.
#pragma once

#include "vector.cuh"

namespace kfc {

// c += a b^T for a: (16, 16) and b: (8, 16) of half types (mma.sync.m16n8k16).
template <class T>
__device__ __forceinline__ void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (__is_same(T, __half)) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
#endif
}

// The halves number `half` of two registers as one.
__device__ __forceinline__ uint32_t pair_of(uint32_t first, uint32_t second, int half) {
  return __byte_perm(first, second, half == 0 ? 0x5410 : 0x7632);
}

// A float8 number: sign, four bits of exponent and three of mantissa, as torch.float8_e4m3fn.
struct Float8 {
  uint8_t bits;
};

// Two halves of T by an operation of halves, from and to the bits of registers.
template <class T, class F>
__device__ __forceinline__ uint32_t of_pairs(uint32_t a, uint32_t b, F operation) {
  using Pair = std::conditional_t<__is_same(T, __half), __half2, __nv_bfloat162>;
  Pair pairs[2];
  memcpy(&pairs[0], &a, 4);
  memcpy(&pairs[1], &b, 4);
  const Pair result = operation(pairs[0], pairs[1]);
  uint32_t bits;
  memcpy(&bits, &result, 4);
  return bits;
}

// Two of the four numbers in `four` as halves of T: the first two, or the last two. Exact, but for float8's NaN, which
// becomes 480: quantizing a row with NaN gives a NaN scale.
template <class T, class W>
__device__ __forceinline__ uint32_t halves_of(uint32_t four, bool last) {
  const auto subtract = [](auto a, auto b) { return __hsub2(a, b); };
  const auto multiply = [](auto a, auto b) { return __hmul2(a, b); };
  if constexpr (__is_same(W, int8_t)) {
    const uint32_t order = last ? 0x4342 : 0x4140;
    if constexpr (__is_same(T, __half)) {
      // 1024 + 128 + value, whose last bits are the byte with its sign inverted
      return of_pairs<T>(__byte_perm(four ^ 0x80808080, 0x64, order), 0x64806480, subtract);
    } else {
      // 128 + the lower seven bits, minus 128, or minus 256 for a negative value
      const uint32_t bytes = __byte_perm(four, 0x43, order);
      return of_pairs<T>(bytes & 0xff7fff7f, bytes & 0xff80ff80, subtract);
    }
  } else {
    // The bits are in place but for the bias of the exponent, which a factor corrects.
    const uint32_t bytes = __byte_perm(four, 0, last ? 0x3424 : 0x1404);
    const uint32_t sign = bytes & 0x80008000;
    if constexpr (__is_same(T, __half)) {
      return of_pairs<T>(sign | (bytes & 0x7f007f00) >> 1, 0x5c005c00, multiply);
    } else {
      return of_pairs<T>(sign | (bytes & 0x7f007f00) >> 4, 0x7b807b80, multiply);
    }
  }
}

}  // namespace kfc
