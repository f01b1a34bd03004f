// 16-byte packs, conversions to the accumulation type, the device's math functions, and sums over a row's
// threads.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../common/activation.h"
#include "../common/arguments.h"
#include "launch.cuh"

namespace kfc {

template <class T>
struct Accumulate {
  using type = float;
};
template <>
struct Accumulate<double> {
  using type = double;
};

// Full-precision device functions: expf 1 ulp, erff and tanhf 2 ulp.
template <class A>
struct Math;
template <>
struct Math<float> {
  static __device__ __forceinline__ float exp(float x) { return expf(x); }
  static __device__ __forceinline__ float tanh(float x) { return tanhf(x); }
  static __device__ __forceinline__ float one_plus_erf(float x) { return 1.0f + erff(x); }
  static __device__ __forceinline__ float divide(float a, float b) { return a / b; }
};
template <>
struct Math<double> {
  static __device__ __forceinline__ double exp(double x) { return ::exp(x); }
  static __device__ __forceinline__ double tanh(double x) { return ::tanh(x); }
  static __device__ __forceinline__ double one_plus_erf(double x) { return 1.0 + ::erf(x); }
  static __device__ __forceinline__ double divide(double a, double b) { return a / b; }
};

// For forward results that are rounded to 16 bits. The GELU after a 4096 x 768 x 3072 product takes 16.7 us on an
// H100 with this, 18.6 us with erff.
//   erfc(z) = exp(-z^2) (c1 t + ... + c6 t^6), t = 1 / (1 + 0.43 z), for z >= 0, is the form of Abramowitz and
//   Stegun 7.1.26; the coefficients are a least-maximum fit of the relative error on [0, 7]: 2.6e-6, a 180th of
//   float16's rounding. 1 + erf(x) = erfc(-x) does not cancel for negative x, as 1 + erff(x) does.
struct HalfMath {
  static __device__ __forceinline__ float exp(float x) { return __expf(x); }
  static __device__ __forceinline__ float tanh(float x) { return tanhf(x); }
  // Exact to 2 ulp. The operator / rounds correctly, but takes as many instructions as an exponential: silu of 1 M
  // float16 elements and a bias takes 3.0 us with the operator, 2.0 us with this.
  static __device__ __forceinline__ float divide(float a, float b) {
    float quotient;
    asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
  }
  static __device__ __forceinline__ float one_plus_erf(float x) {
    const float z = fabsf(x);
    const float t = __fdividef(1.0f, fmaf(0.43f, z, 1.0f));
    float p = fmaf(t, -0.15778620541095734f, 0.4201318323612213f);
    p = fmaf(p, t, -0.02565119042992592f);
    p = fmaf(p, t, 0.28938254714012146f);
    p = fmaf(p, t, 0.23046672344207764f);
    p = fmaf(p, t, 0.2434537559747696f);
    const float q = p * t * __expf(-z * z);
    return x < 0.0f ? q : 2.0f - q;
  }
};

}  // namespace kfc

namespace {

// Exact to 1 ulp; a result below the normal numbers becomes 0.
KFC_FN float rough_reciprocal(float v) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(v));
  return reciprocal;
}

// The operator / has a branch for quotients that are out of range, so that one element waits for another. The functions
// here take a Newton step from a reciprocal of 1 ulp, without a branch, and are as exact as / except for ties.
template <>
struct Cheaper<kfc::Math<float>, float> : AsWritten<kfc::Math<float>, float> {
  KFC_FN float divide(float a, float b) {
    float reciprocal;
    asm("rcp.approx.f32 %0, %1;" : "=f"(reciprocal) : "f"(b));
    const float rough = a * reciprocal;
    const float quotient = corrected(a, b, rough, reciprocal);
    return quotient == quotient ? quotient : rough;  // infinite a or b leave no remainder
  }
  KFC_FN float divide_bounded(float a, float b) {
    const float reciprocal = rough_reciprocal(b);
    return corrected(a, b, a * reciprocal, reciprocal);
  }

 private:
  KFC_FN float corrected(float a, float b, float quotient, float reciprocal) {
    return fmaf(fmaf(-b, quotient, a), reciprocal, quotient);
  }
};
template <>
struct Cheaper<kfc::HalfMath, float> : AsWritten<kfc::HalfMath, float> {
  KFC_FN float divide_bounded(float a, float b) { return a * rough_reciprocal(b); }
};

}  // namespace

namespace kfc {

template <class T>
struct MathFor {
  using type = Math<T>;
};
template <>
struct MathFor<__half> {
  using type = HalfMath;
};
template <>
struct MathFor<__nv_bfloat16> {
  using type = HalfMath;
};

__device__ __forceinline__ float widen(__half v) { return __half2float(v); }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ int8_t widen(int8_t v) { return v; }
__device__ __forceinline__ int32_t widen(int32_t v) { return v; }
__device__ __forceinline__ int64_t widen(int64_t v) { return v; }
__device__ __forceinline__ double widen(double v) { return v; }

template <class T, class A>
__device__ __forceinline__ T narrow(A v) {
  if constexpr (sizeof(T) == 2) {
    if constexpr (__is_same(T, __half))
      return __float2half_rn(v);
    else
      return __float2bfloat16_rn(v);
  } else {
    return v;
  }
}

constexpr int kPackBytes = 16;

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T v[N];
};

// The type of one access to a pack of so many bytes.
template <int BYTES>
struct Access;
template <>
struct Access<16> {
  using type = uint4;
};
template <>
struct Access<8> {
  using type = uint2;
};
template <>
struct Access<4> {
  using type = unsigned int;
};
template <>
struct Access<2> {
  using type = unsigned short;
};
template <>
struct Access<1> {
  using type = unsigned char;
};

// A pack as one word of memory. Where a pack is loaded under a condition only, choose between words: between packs the
// compiler would choose element by element.
template <class P>
using Word = typename Access<sizeof(P)>::type;

template <class P>
__device__ __forceinline__ P pack_of(Word<P> word) {
  P pack;
  memcpy(&pack, &word, sizeof(P));
  return pack;
}

template <class P>
__device__ __forceinline__ Word<P> word_of(const P& pack) {
  Word<P> word;
  memcpy(&word, &pack, sizeof(P));
  return word;
}

template <class T, int N, class A>
__device__ __forceinline__ void widen_word(Word<Pack<T, N>> word, A (&to)[N]) {
  const auto pack = pack_of<Pack<T, N>>(word);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = widen(pack.v[i]);
}

// A pack of global memory in one access.
template <class P, class T>
__device__ __forceinline__ Word<P> load_word(const T* from) {
  return *reinterpret_cast<const Word<P>*>(from);
}

template <class P, class T>
__device__ __forceinline__ P load_pack(const T* from) {
  return pack_of<P>(load_word<P>(from));
}

// Stores by an intrinsic, because the compiler takes assignments of structs apart and does not always join the parts
// again: the second of two packs of a thread came out as eight stores of two bytes.
template <class P, class T>
__device__ __forceinline__ void store_pack(T* to, const P& pack) {
  __stwb(reinterpret_cast<Word<P>*>(to), word_of(pack));
}

template <int N, class T, class A>
__device__ __forceinline__ void load(const T* from, A (&to)[N]) {
  widen_word<T>(load_word<Pack<T, N>>(from), to);
}

template <int N, class T, class A>
__device__ __forceinline__ void store(T* to, const A (&from)[N]) {
  Pack<T, N> pack;
#pragma unroll
  for (int i = 0; i < N; ++i) pack.v[i] = narrow<T>(from[i]);
  store_pack(to, pack);
}

// N elements in packs of at most 16 bytes
template <int N, class T, class A>
__device__ __forceinline__ void load_wide(const T* from, A (&to)[N]) {
  constexpr int M = N * sizeof(T) > kPackBytes ? kPackBytes / sizeof(T) : N;
#pragma unroll
  for (int i = 0; i < N; i += M) {
    A part[M];
    load<M>(from + i, part);
#pragma unroll
    for (int j = 0; j < M; ++j) to[i + j] = part[j];
  }
}

template <int N, class T, class A>
__device__ __forceinline__ void store_wide(T* to, const A (&from)[N]) {
  constexpr int M = N * sizeof(T) > kPackBytes ? kPackBytes / sizeof(T) : N;
#pragma unroll
  for (int i = 0; i < N; i += M) {
    A part[M];
#pragma unroll
    for (int j = 0; j < M; ++j) part[j] = from[i + j];
    store<M>(to + i, part);
  }
}

// Whether weight and bias have the dtype of x. Kernels that hold rows in registers require that: with a test of the
// dtype at each pack, the loads of a pack would wait until the packs before it have been used.
template <class T, class Arguments>
bool has_own_affine(const Arguments& a) {
  return sizeof(T) != 2 || a.affine_dtype != DType::f32;
}

// A row parameter of the norm: T, or float beside a half type. The branch is the same for all threads.
template <int N, class T, class A>
__device__ __forceinline__ void load_affine(const void* from, bool is_float, int64_t at, A (&to)[N]) {
  if (sizeof(T) == 2 && is_float) {
    load_wide<N>(static_cast<const float*>(from) + at, to);
  } else {
    load<N>(static_cast<const T*>(from) + at, to);
  }
}

// weight + offset of a norm. An offset of 0 is not added, as it would turn a weight of -0 into 0.
template <int N, class T, class Arguments, class A>
__device__ __forceinline__ void load_weight(const Arguments& a, int64_t col, A (&to)[N]) {
  load_affine<N, T>(a.weight, a.affine_dtype == DType::f32, col, to);
  if (a.offset == 0) return;
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] += static_cast<A>(a.offset);
}

// v = v * (weight + offset) + bias for the columns from col on
template <class T, int N, class Arguments, class A>
__device__ __forceinline__ void apply_affine(const Arguments& a, int64_t col, A (&v)[N]) {
  A other[N];
  if (a.weight != nullptr) {
    load_weight<N, T>(a, col, other);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] *= other[j];
  }
  if (a.bias != nullptr) {
    load_affine<N, T>(a.bias, a.affine_dtype == DType::f32, col, other);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] += other[j];
  }
}

template <Act act, class M, int N, class A>
__device__ __forceinline__ void activate_each(A (&v)[N], A slope) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = activate<act, M>(v[i], slope);
}

// For results that are rounded to T.
template <class T, int N, class A>
__device__ __forceinline__ void activate_pack(int code, A (&v)[N], A slope) {
  using M = typename MathFor<T>::type;
  KFC_DISPATCH_ACTIVATION(code, (activate_each<act, M>(v, slope)));
}

template <Act act, class M, int N, class A>
__device__ __forceinline__ void activate_backward_each(const A (&g)[N], A (&v)[N], A slope) {
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = activate_backward<act, M>(g[i], v[i], slope);
}

// v[i] = g[i] * act'(v[i]); v as Activation.saves_output says
template <class T, int N, class A>
__device__ __forceinline__ void activate_backward_pack(int code, const A (&g)[N], A (&v)[N], A slope) {
  using M = typename MathFor<T>::type;
  KFC_DISPATCH_ACTIVATION(code, (activate_backward_each<act, M>(g, v, slope)));
}

// The same two functions, not inlined: the kernels of the norms unroll over a row's packs, and all activations inlined
// for every pack would take minutes to compile and cost all norms registers.
template <class T, class A, int N>
__device__ __noinline__ Pack<A, N> activate_call(int code, Pack<A, N> v, A slope) {
  activate_pack<T>(code, v.v, slope);
  return v;
}

template <Act act, class M, int N, class A>
__device__ __forceinline__ void activate_backward_from_input_each(A (&g)[N], const A (&v)[N], A slope) {
#pragma unroll
  for (int i = 0; i < N; ++i) g[i] = activate_backward_from_input<act, M>(g[i], v[i], slope);
}

// g[i] * act'(v[i]); v is always the input
template <class T, class A, int N>
__device__ __noinline__ Pack<A, N> activate_backward_call(int code, Pack<A, N> g, Pack<A, N> v, A slope) {
  using M = typename MathFor<T>::type;
  KFC_DISPATCH_ACTIVATION(code, (activate_backward_from_input_each<act, M>(g.v, v.v, slope)));
  return g;
}

// Stands in place of an activation for whichever one is given at run time. It is an int, because template arguments of
// kernels must be of a type that has a name outside of this file.
constexpr int kAny = -1;

// v[i] = act(v[i]) with the activation `act` of the kernel; in a kernel for kAny, with the one that `code` names.
template <int act, class T, int N, class A>
__device__ __forceinline__ void activate_as(int code, A (&v)[N], A slope) {
  if constexpr (act != kAny) {
    activate_each<static_cast<Act>(act), typename MathFor<T>::type>(v, slope);
  } else {
    Pack<A, N> pack;
#pragma unroll
    for (int i = 0; i < N; ++i) pack.v[i] = v[i];
    pack = activate_call<T>(code, pack, slope);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = pack.v[i];
  }
}

// g[i] * act'(v[i]), likewise; v is always the input
template <int act, class T, int N, class A>
__device__ __forceinline__ void activate_backward_as(int code, A (&g)[N], const A (&v)[N], A slope) {
  if constexpr (act != kAny) {
    activate_backward_from_input_each<static_cast<Act>(act), typename MathFor<T>::type>(g, v, slope);
  } else {
    Pack<A, N> gradient;
    Pack<A, N> input;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      gradient.v[i] = g[i];
      input.v[i] = v[i];
    }
    gradient = activate_backward_call<T>(code, gradient, input, slope);
#pragma unroll
    for (int i = 0; i < N; ++i) g[i] = gradient.v[i];
  }
}

// Calls launch with the activation as a compile-time constant: those that commonly follow norms have kernels of their
// own, which inline them; all others share the kernel for kAny.
template <class Launch>
void dispatch_row_activation(int code, Launch launch) {
  switch (code) {
    case kNone:
      return launch(std::integral_constant<int, kNone>());
    case kRelu:
      return launch(std::integral_constant<int, kRelu>());
    case kGelu:
      return launch(std::integral_constant<int, kGelu>());
    case kSilu:
      return launch(std::integral_constant<int, kSilu>());
    default:
      return launch(std::integral_constant<int, kAny>());
  }
}

// Sums over WIDTH neighbouring lanes. All SUMS sums are taken at once, in the latency of one.
template <int WIDTH, class A, int SUMS>
__device__ __forceinline__ void lane_sums(A (&values)[SUMS]) {
#pragma unroll
  for (int offset = WIDTH / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int k = 0; k < SUMS; ++k) values[k] += __shfl_xor_sync(0xffffffffu, values[k], offset);
  }
}

// Adds up over the THREADS threads of a row: within a warp by shuffles, across warps through shared memory. Every
// thread gets the sums. With more than a warp a row, all threads of the block must call it; `shared` holds 32 values
// for each sum. FREE: all threads have passed a barrier since `shared` was last read, so that it may be written at
// once.
template <int THREADS, bool FREE = false, class A, int SUMS>
__device__ __forceinline__ void row_sums(A (&values)[SUMS], A* shared) {
  lane_sums<(THREADS < 32 ? THREADS : 32)>(values);
  if constexpr (THREADS > 32) {
    constexpr int kWarps = THREADS / 32;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int first = warp / kWarps * kWarps;
    if constexpr (!FREE) __syncthreads();
#pragma unroll
    for (int k = 0; k < SUMS; ++k) {
      if (lane == 0) shared[32 * k + warp] = values[k];
    }
    __syncthreads();
    if constexpr (kWarps <= 8) {
      // All lanes read the same address at a time: such reads follow each other sooner than shuffles do.
#pragma unroll
      for (int k = 0; k < SUMS; ++k) {
        values[k] = shared[32 * k + first];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) values[k] += shared[32 * k + first + w];
      }
    } else {
#pragma unroll
      for (int k = 0; k < SUMS; ++k) values[k] = lane < kWarps ? shared[32 * k + first + lane] : A(0);
      lane_sums<32>(values);
    }
  }
}

template <int THREADS, bool FREE = false, class A>
__device__ __forceinline__ A row_sum(A value, A* shared) {
  A values[1] = {value};
  row_sums<THREADS, FREE>(values, shared);
  return values[0];
}

// Corrects the mean and variance of a row for the rounding error of the mean: the corrected two-pass algorithm (Chan,
// Golub and LeVeque, "Algorithms for computing the sample variance", 1983). The variance of a row of equal values would
// be nothing but that error. Where a row varies, the error is smaller than the variance, so that `deviations`, which
// returns a thread's part of the sum of deviations from `mean`, is called only for rows that hardly vary.
template <int THREADS, bool FREE = false, class A, class Deviations>
__device__ __forceinline__ void correct_moments(A& mean, A& variance, A inverse, A* shared, Deviations deviations) {
  bool needed = variance < A(1e-6) * mean * mean;
  if constexpr (THREADS < 32) needed = __any_sync(0xffffffffu, needed);  // a warp has several rows
  if (!needed) return;
  const A rest = row_sum<THREADS, FREE>(deviations(), shared) * inverse;
  mean += rest;
  variance -= rest * rest;
  if (variance < A(0)) variance = 0;
}

inline bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kPackBytes == 0; }

inline int multiprocessors() {
  const int count = device_attribute<cudaDevAttrMultiProcessorCount>();
  return count < 1 ? 1 : count;
}

// Calls BODY with T as the half type that DTYPE names.
#define KFC_DISPATCH_HALF(DTYPE, ...) \
  if ((DTYPE) == DType::f16) {        \
    using T = __half;                 \
    __VA_ARGS__;                      \
  } else {                            \
    using T = __nv_bfloat16;          \
    __VA_ARGS__;                      \
  }

#define KFC_DISPATCH_DTYPE(DTYPE, ...) \
  switch (DTYPE) {                     \
    case DType::f32: {                 \
      using T = float;                 \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case DType::f64: {                 \
      using T = double;                \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case DType::f16: {                 \
      using T = __half;                \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
    case DType::bf16: {                \
      using T = __nv_bfloat16;         \
      __VA_ARGS__;                     \
      break;                           \
    }                                  \
  }

}  // namespace kfc
