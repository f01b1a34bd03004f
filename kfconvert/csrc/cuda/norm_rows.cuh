// What the forward kernels of layer and RMS norms share once they have s: the moments of its rows, and writing a row.
#pragma once

#include "rows.cuh"

namespace kfc {
namespace {

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

// Of a row whose packs s the THREADS threads hold, in two passes; what the row does not have is 0. `shared` holds
// kMomentValues: every sum has its own place, which no thread reads any more when the next row comes to it.
template <bool CENTRED, int THREADS, int ITEMS, int N, class A>
__device__ __forceinline__ RowMoments<A> moments_of(const A (&s)[ITEMS][N], int64_t cols, double eps, bool active,
                                                    A* shared) {
  const A inverse = A(1) / static_cast<A>(static_cast<int>(cols));  // 64 bits would take longer
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
  return {mean, rsqrt(variance + static_cast<A>(eps))};
}

// Kahan's compensated sum ("Further remarks on reducing truncation errors", 1965): a thread adds up thousands of terms
// of a long row, and roundings that are all alike, as those of squares of one magnitude, would add up as well.
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
__device__ __forceinline__ RowMoments<A> moments_of_long_row(Load load, int64_t cols, double eps, A* shared) {
  const A inverse = A(1) / static_cast<A>(cols);
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
    correct_moments<THREADS>(mean, variance, inverse, shared,
                             [&] { return add_up([mean](A v) { return v - mean; }); });
  }
  return {mean, rsqrt(variance + static_cast<A>(eps))};
}

// Weight and bias of a thread's packs of columns, for all its rows. Few are loaded before the first row, so that the
// row is waited for at the same time: behind its sums they would be waited for anew. More of them would take the
// registers that the row needs.
template <class T, int N, int THREADS, int ITEMS>
class RowAffine {
 public:
  using A = typename Accumulate<T>::type;

  __device__ __forceinline__ explicit RowAffine(const LayerNorm& a) : a_(a) {
    if constexpr (kEarly) {
      early_ = sizeof(T) != 2 || a.affine_dtype != DType::f32;
      shifted_ = a.offset != 0;
      if (!early_) return;
#pragma unroll
      for (int i = 0; i < ITEMS; ++i) {
        const int col = column(i);
        if (a.weight != nullptr && col < a.cols) weight_[i] = word_at(a.weight, col);
        if (a.bias != nullptr && col < a.cols) bias_[i] = word_at(a.bias, col);
      }
    }
  }

  // Of the item'th pack v.
  __device__ __forceinline__ void apply(int item, A (&v)[N]) const {
    if constexpr (kEarly) {
      if (early_) {
        A other[N];
        if (a_.weight != nullptr) {
          convert(weight_[item], other);
          if (shifted_) {
#pragma unroll
            for (int j = 0; j < N; ++j) other[j] += static_cast<A>(a_.offset);
          }
#pragma unroll
          for (int j = 0; j < N; ++j) v[j] *= other[j];
        }
        if (a_.bias != nullptr) {
          convert(bias_[item], other);
#pragma unroll
          for (int j = 0; j < N; ++j) v[j] += other[j];
        }
        return;
      }
    }
    apply_affine<T>(a_, column(item), v);
  }

 private:
  using P = Pack<T, N>;
  static constexpr bool kEarly = sizeof(P) == kPackBytes && ITEMS * N <= 8;

  static __device__ __forceinline__ int column(int item) {
    return (item * THREADS + static_cast<int>(threadIdx.x % THREADS)) * N;
  }

  static __device__ __forceinline__ Word<P> word_at(const void* from, int col) {
    return *reinterpret_cast<const Word<P>*>(static_cast<const T*>(from) + col);
  }

  // The empty instruction keeps the compiler from converting ahead of the rows: that would wait for the word before the
  // first row is asked for.
  static __device__ __forceinline__ void convert(Word<P> word, A (&to)[N]) {
    asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
    const P pack = pack_of<P>(word);
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = widen(pack.v[j]);
  }

  const LayerNorm& a_;
  bool early_;
  bool shifted_;
  Word<P> weight_[kEarly ? ITEMS : 1];
  Word<P> bias_[kEarly ? ITEMS : 1];
};

// apply(v) applies weight and bias.
template <int act, class T, int N, class A, class Apply>
__device__ __forceinline__ void write_pack(const LayerNorm& a, int64_t row, int64_t col, RowMoments<A> moments,
                                           const A (&s)[N], Apply apply) {
  A v[N];
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = (s[j] - moments.mean) * moments.rstd;
  apply(v);
  activate_as<act, T>(a.activation, v, static_cast<A>(a.slope));
  store<N>(static_cast<T*>(a.y) + row * a.cols + col, v);
}

}  // namespace
}  // namespace kfc
