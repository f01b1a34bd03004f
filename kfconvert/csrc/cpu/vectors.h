// Vectors as wide as the processor's, with loads and stores of their first elements: the end of a row, or all of a
// short one, then costs what a whole vector does and not an instruction for each element.
#pragma once

#include "convert.h"

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class A>
struct VectorOf {
  typedef A type __attribute__((vector_size(kVectorBytes)));
};
template <class A>
using Vector = typename VectorOf<A>::type;

template <class A>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(A));

template <class A>
KFC_FN Vector<A> load_vector(const A* from) {
  Vector<A> v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

template <class A>
KFC_FN void store_vector(Vector<A> v, A* to) {
  std::memcpy(to, &v, sizeof(v));
}

#if defined(__AVX2__) && !defined(__AVX512F__)
KFC_FN __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
#endif

// from[0] to from[n - 1], then `fill`; n is less than kWidth.
template <class A>
KFC_FN Vector<A> load_first(const A* from, int n, A fill) {
  if constexpr (sizeof(A) == 4) {
#if defined(__AVX512F__)
    return (Vector<A>)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), static_cast<__mmask16>((1u << n) - 1), from);
#elif defined(__AVX2__)
    const __m256i mask = first_lanes(n);
    return (Vector<A>)_mm256_blendv_ps(_mm256_set1_ps(fill), _mm256_maskload_ps(from, mask), (__m256)mask);
#endif
  }
  Vector<A> v = Vector<A>{} + fill;
  for (int i = 0; i < n; ++i) v[i] = from[i];
  return v;
}

// to[0] to to[n - 1]; n is less than kWidth.
template <class A>
KFC_FN void store_first(Vector<A> v, A* to, int n) {
  if constexpr (sizeof(A) == 4) {
#if defined(__AVX512F__)
    return _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
#elif defined(__AVX2__)
    return _mm256_maskstore_ps(to, first_lanes(n), (__m256)v);
#endif
  }
  for (int i = 0; i < n; ++i) to[i] = v[i];
}

// All elements joined by join(a, b), which also takes vectors: half of a vector with the other half, and so on.
template <class A, class Join>
KFC_FN A across(Vector<A> v, Join join) {
#if defined(__AVX2__)
  if constexpr (sizeof(A) == 4) {
#if defined(__AVX512F__)
    // These forms take masks, which leave nothing out here: in the forms without, GCC 12 sees uninitialised operands.
    const __m256 low = _mm512_maskz_extractf32x8_ps(0xff, (__m512)v, 0);
    const __m256 eight = join(low, _mm512_maskz_extractf32x8_ps(0xff, (__m512)v, 1));
#else
    const __m256 eight = (__m256)v;
#endif
    __m128 four = join(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = join(four, _mm_movehl_ps(four, four));
    return join(four, _mm_movehdup_ps(four))[0];
  }
#endif
  A parts[kWidth<A>];
  store_vector<A>(v, parts);
#pragma GCC unroll 8
  for (int width = kWidth<A> / 2; width > 0; width /= 2) {
#pragma omp simd
    for (int i = 0; i < width; ++i) parts[i] = join(parts[i], parts[width + i]);
  }
  return parts[0];
}

// Sums are kept in four vectors, to which terms are added in turn, as each addition to a vector waits for the one
// before.
constexpr int kChains = 4;

template <class A>
KFC_FN A sum_of_chains(const Vector<A> (&sums)[kChains]) {
  return across<A>((sums[0] + sums[1]) + (sums[2] + sums[3]), [](auto a, auto b) { return a + b; });
}

// Calls step(k, load) for each vector of n elements, in the order of memory: load(row, fill) gives these elements of
// any row, and `fill` beyond its end; k is the chain of additions for them. The order matters, because a CPU prefetches
// a row that is read as one stream, but not one that is read at several places of a page in turn.
template <class A, class Step>
KFC_FN void in_vectors(int64_t n, Step step) {
  int64_t i = 0;
  for (; i + kChains * kWidth<A> <= n; i += kChains * kWidth<A>) {
#pragma GCC unroll 4
    for (int k = 0; k < kChains; ++k) {
      step(k, [at = i + k * kWidth<A>](const A* row, A) { return load_vector(row + at); });
    }
  }
  for (; i + kWidth<A> <= n; i += kWidth<A>) {
    step(0, [i](const A* row, A) { return load_vector(row + i); });
  }
  const int rest = static_cast<int>(n - i);
  if (rest > 0) step(0, [i, rest](const A* row, A fill) { return load_first(row + i, rest, fill); });
}

// out = map(load), vector by vector, of n elements: load(row) gives those elements of a row. May run in place.
template <class A, class Map>
KFC_FN void map_vectors(int64_t n, A* out, Map map) {
  int64_t i = 0;
  for (; i + kWidth<A> <= n; i += kWidth<A>) {
    store_vector<A>(map([i](const A* row) { return load_vector(row + i); }), out + i);
  }
  const int rest = static_cast<int>(n - i);
  if (rest == 0) return;
  store_first<A>(map([i, rest](const A* row) { return load_first(row + i, rest, A(0)); }), out + i, rest);
}

}  // namespace
