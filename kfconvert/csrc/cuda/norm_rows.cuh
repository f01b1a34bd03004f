// What the forward kernels of layer and RMS norms share once they have s: the moments of its rows, and writing a row.
#pragma once

#include "rows.cuh"

namespace kfc {
namespace {

// Numbers of a norm in its accumulation type, from the host: conversions of doubles and a division in every thread
// would keep a short row waiting.
template <class A>
struct NormScalars {
  A inverse;  // 1 / cols
  A eps;
  A offset;  // -0 for none, which leaves every weight as it is, also one of -0
  A slope;

  explicit NormScalars(const LayerNorm& a)
      : inverse(A(1) / static_cast<A>(a.cols)),
        eps(static_cast<A>(a.eps)),
        offset(a.offset == 0 ? A(-0.0) : static_cast<A>(a.offset)),
        slope(static_cast<A>(a.slope)) {}
};

template <class T>
using NormScalarsOf = NormScalars<typename Accumulate<T>::type>;

// What the first pass adds up: for the mean, or the squares right away.
template <bool CENTRED, class A>
__device__ __forceinline__ A first_term(A s) {
  return CENTRED ? s : s * s;
}

constexpr int kMomentValues = 3 * 32;

template <class A>
struct RowMoments {
  A mean;  // 0 where not CENTRED
  A rstd;
};

// The moments of a row whose packs s the THREADS threads hold, in two passes; elements beyond the row's end are 0.
// `shared` holds kMomentValues: every sum has its own place, so that no thread still reads it when the next row writes
// there.
template <bool CENTRED, int THREADS, int ITEMS, int N, class A>
__device__ __forceinline__ RowMoments<A> moments_of(const A (&s)[ITEMS][N], int64_t cols, const NormScalars<A>& norm,
                                                    bool active, A* shared) {
  const A inverse = norm.inverse;
  const int lane = threadIdx.x % THREADS;
  A total = 0;
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) total += first_term<CENTRED>(s[i][j]);
  }
  A mean = 0;
  A variance = row_sum<THREADS, CENTRED>(total, shared) * inverse;
  if constexpr (CENTRED) {
    mean = variance;
    // The sum of term(s) over this thread's part of the row
    const auto add_up = [&](auto term) {
      A sum = 0;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (active && (i * THREADS + lane) * N < cols) {
#pragma unroll
          for (int j = 0; j < N; ++j) sum += term(s[i][j]);
        }
      }
      return sum;
    };
    const A squares = add_up([mean](A v) { return (v - mean) * (v - mean); });
    variance = row_sum<THREADS, true>(squares, shared + 32) * inverse;
    correct_moments<THREADS, true>(mean, variance, inverse, shared + 64,
                                   [&] { return add_up([mean](A v) { return v - mean; }); });
  }
  return {mean, rsqrt(variance + norm.eps)};
}

// Kahan's compensated sum ("Further remarks on reducing truncation errors", 1965): a thread adds up thousands of terms
// of a long row, and without compensation roundings that are all alike, as those of squares of one magnitude, would add
// up as well.
template <class A>
struct CompensatedSum {
  A sum = 0;
  A excess = 0;
  __device__ __forceinline__ void add(A term) {
    const A wanted = term - excess;
    const A next = sum + wanted;
    excess = (next - sum) - wanted;
    sum = next;
  }
};

// Of a row of any length, of which load(col, s) gives N elements.
template <bool CENTRED, int THREADS, int N, class A, class Load>
__device__ __forceinline__ RowMoments<A> moments_of_long_row(Load load, int64_t cols, const NormScalars<A>& norm,
                                                             A* shared) {
  const A inverse = norm.inverse;
  const auto add_up = [&](auto term) {
    CompensatedSum<A> total;
    A s[N];
    for (int64_t col = static_cast<int64_t>(threadIdx.x) * N; col < cols; col += THREADS * N) {
      load(col, s);
      A part = 0;
#pragma unroll
      for (int j = 0; j < N; ++j) part += term(s[j]);
      total.add(part);
    }
    return total.sum;
  };
  A mean = 0;
  A variance = row_sum<THREADS>(add_up([](A v) { return first_term<CENTRED>(v); }), shared) * inverse;
  if constexpr (CENTRED) {
    mean = variance;
    variance = row_sum<THREADS>(add_up([mean](A v) { return (v - mean) * (v - mean); }), shared) * inverse;
    correct_moments<THREADS>(mean, variance, inverse, shared, [&] { return add_up([mean](A v) { return v - mean; }); });
  }
  return {mean, rsqrt(variance + norm.eps)};
}

// Weight and bias, of the dtype of x, for a thread's packs of columns and all its rows. If EARLY, they are loaded
// before the first row, so that one wait serves both; after the sums of the row there would be a second wait. But that
// takes registers that a long row needs.
template <bool CENTRED, class T, int N, int THREADS, int ITEMS, bool EARLY>
class RowAffine {
 public:
  using A = typename Accumulate<T>::type;

  __device__ __forceinline__ RowAffine(const LayerNorm& a, const NormScalars<A>& norm) : a_(a), offset_(norm.offset) {
    if constexpr (EARLY) {
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        if (a.weight != nullptr && column(i) < a.cols) weight_[i] = word_at(a.weight, i);
        if (CENTRED && a.bias != nullptr && column(i) < a.cols) bias_[i] = word_at(a.bias, i);
      }
    }
  }

  // Of the item'th pack v.
  __device__ __forceinline__ void apply(int item, A (&v)[N]) const {
    A other[N];
    if (a_.weight != nullptr) {
      get(weight_, a_.weight, item, other);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] *= CENTRED ? other[j] : other[j] + offset_;
    }
    if (CENTRED && a_.bias != nullptr) {
      get(bias_, a_.bias, item, other);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] += other[j];
    }
  }

 private:
  using P = Pack<T, N>;
  static constexpr int kKept = EARLY ? ITEMS : 1;

  static __device__ __forceinline__ int column(int item) {
    return (item * THREADS + static_cast<int>(threadIdx.x % THREADS)) * N;
  }

  static __device__ __forceinline__ Word<P> word_at(const void* from, int item) {
    return load_word<P>(static_cast<const T*>(from) + column(item));
  }

  static __device__ __forceinline__ void get(const Word<P> (&kept)[kKept], const void* from, int item, A (&to)[N]) {
    Word<P> word;
    if constexpr (EARLY) {
      word = kept[item];
      // The empty instruction keeps the compiler from moving the conversion ahead of the loads of the rows, where it
      // would wait for the word before the first row is even asked for.
      asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
    } else {
      word = word_at(from, item);
    }
    widen_word<T>(word, to);
  }

  const LayerNorm& a_;
  A offset_;
  Word<P> weight_[kKept];
  Word<P> bias_[kKept];
};

// So many blocks of a kernel that holds rows of up to 32 elements a thread fit a multiprocessor, with 64 registers a
// thread. Then an H100 has 1024 rows of 4096 float16 elements all on their way at once. Weights and biases that are
// asked for early need more registers.
template <int THREADS, bool EARLY>
constexpr int kNormBlocks = EARLY ? 1 : 1024 / row_block(THREADS);

// apply(v) applies weight and bias.
template <int act, class T, int N, class A, class Apply>
__device__ __forceinline__ void write_pack(const LayerNorm& a, int64_t row, int64_t col, RowMoments<A> moments, A slope,
                                           const A (&s)[N], Apply apply) {
  A v[N];
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = (s[j] - moments.mean) * moments.rstd;
  apply(v);
  activate_as<act, T>(a.activation, v, slope);
  store<N>(static_cast<T*>(a.y) + row * a.cols + col, v);
}

}  // namespace
}  // namespace kfc
