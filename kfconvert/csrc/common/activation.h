// The activations and their derivatives, once for CPU and CUDA.
//
//   forward   y  = act(v)
//   backward  dv = g * act'(v); relu, tanh, sigmoid, relu6 and exp(2 v) take the output y in place of v
//   (Activation.saves_output)
//
// M supplies exp, 1 + erf and tanh for the accumulation type A (float for the half types and float32, double for
// float64). Comparisons are written so that a NaN goes through, as it does in ATen.
#pragma once

#ifdef __CUDACC__
#define KFC_FN static __device__ __forceinline__
#else
#define KFC_FN static inline __attribute__((always_inline))
#endif

namespace {

// The numbers are those of kfconvert/ops/activations.py.
enum Act : int {
  kNone = 0,
  kRelu = 1,
  kGelu = 2,
  kGeluTanh = 3,
  kSilu = 4,
  kTanh = 5,
  kSigmoid = 6,
  kRelu6 = 7,
  kHardswish = 8,
  kLeakyRelu = 9,
  kQuickGelu = 10,
  kHardsigmoid = 11,
  kExpTwice = 12,
  kMish = 13,
};

template <class A>
struct Constants {
  static constexpr A sqrt_half = A(0.70710678118654752440);            // 1 / sqrt(2)
  static constexpr A inv_sqrt_two_pi = A(0.39894228040143267794);      // 1 / sqrt(2 pi)
  static constexpr A two_sqrt_two_over_pi = A(1.5957691216057307117);  // 2 sqrt(2 / pi)
  static constexpr A gelu_cubic = A(0.044715);
  static constexpr A quick_gelu_slope = A(1.702);
  // Rounded as they are, 6 sixths and 3 thirds are 1: a gate that is open is so to the last bit.
  static constexpr A sixth = A(1) / A(6);
  static constexpr A third = A(1) / A(3);
  // Up to here exp(-w) and exp(w) are normal numbers. Beyond, the derivative of w sigmoid(w) is as good as 0 or 1.
  static constexpr A gate_limit = sizeof(A) == 4 ? A(87) : A(700);
  static constexpr A gelu_tanh_limit = sizeof(A) == 4 ? A(9.95) : A(20.9);  // gelu_tanh_argument: 86.2, 685
  static constexpr A mish_limit = A(1e17);  // of exp(v): tanh(softplus(v)) is 1, and the square still finite
};

// The standard normal distribution, and its density times sqrt(2 pi).
template <class A>
struct Normal {
  A cdf;
  A density;
};

// What M may have a cheaper form of than these, in a Cheaper of its own.
template <class M, class A>
struct AsWritten {
  // v, or the nearest number of magnitude `limit`; a NaN stays one.
  KFC_FN A within(A v, A limit) {
    const A low = v < -limit ? -limit : v;
    return low > limit ? limit : low;
  }
  // The smaller one; neither has a sign. Beside a NaN it may be either.
  KFC_FN A at_most(A magnitude, A bound) { return magnitude > bound ? bound : magnitude; }
  // exp(x) for x within Constants::gate_limit
  KFC_FN A exp_bounded(A x) { return M::exp(x); }
  // a / b for b of at least 1
  KFC_FN A divide(A a, A b) { return M::divide(a, b); }
  // The same for b of at most exp(gate_limit), and a finite a.
  KFC_FN A divide_bounded(A a, A b) { return M::divide(a, b); }
  KFC_FN Normal<A> normal(A v) {
    return {A(0.5) * M::one_plus_erf(v * Constants<A>::sqrt_half), M::exp(A(-0.5) * v * v)};
  }
};

template <class M, class A>
struct Cheaper : AsWritten<M, A> {};

// tanh-GELU is 0.5 v (1 + tanh(w/2)) = v / (1 + exp(-w)), which keeps its relative accuracy where 1 + tanh
// cancels.
template <class A>
KFC_FN A gelu_tanh_argument(A v) {
  return Constants<A>::two_sqrt_two_over_pi * (v + Constants<A>::gelu_cubic * v * v * v);
}

// v / (1 + exp(-w))
template <class M, class A>
KFC_FN A gated(A v, A w) {
  return Cheaper<M, A>::divide(v, A(1) + M::exp(-w));
}

// d/dv of v gate(w) = gate (1 + v (1 - gate) dw/dv) with gate = 1 / (1 + e), 1 - gate = e gate, e = exp(-w):
// 1 - gate by subtraction would lose all its digits where gate is near 1. v and with it w and dw/dv must be bounded, so
// that neither e nor the product overflows.
template <class M, class A>
KFC_FN A gated_backward(A g, A v, A w, A slope_of_w) {
  const A e = Cheaper<M, A>::exp_bounded(-w);
  const A gate = Cheaper<M, A>::divide_bounded(A(1), A(1) + e);
  return g * gate * (A(1) + v * (e * gate) * slope_of_w);
}

// v + 3 between 0 and 6, as a share of that
template <class A>
KFC_FN A hard_gate(A v) {
  const A gate = v + A(3);
  return (gate <= A(0) ? A(0) : (gate >= A(6) ? A(6) : gate)) * Constants<A>::sixth;
}

template <Act act, class M, class A>
KFC_FN A activate(A v, A slope) {
  if constexpr (act == kRelu) return v <= A(0) ? A(0) : v;
  if constexpr (act == kGelu) return v * Cheaper<M, A>::normal(v).cdf;
  if constexpr (act == kGeluTanh) return gated<M>(v, gelu_tanh_argument(v));
  if constexpr (act == kSilu) return gated<M>(v, v);
  if constexpr (act == kQuickGelu) return gated<M>(v, Constants<A>::quick_gelu_slope * v);
  if constexpr (act == kTanh) return M::tanh(v);
  if constexpr (act == kSigmoid) return gated<M>(A(1), v);
  if constexpr (act == kRelu6) return v <= A(0) ? A(0) : (v >= A(6) ? A(6) : v);
  if constexpr (act == kHardswish) return v * hard_gate(v);
  if constexpr (act == kLeakyRelu) return v > A(0) ? v : v * slope;
  if constexpr (act == kHardsigmoid) return hard_gate(v);
  if constexpr (act == kExpTwice) return M::exp(v + v);
  if constexpr (act == kMish) {
    // tanh(softplus(v)) = n / (n + 2) with n = e (e + 2), e = exp(v)
    const A e = Cheaper<M, A>::at_most(M::exp(v), Constants<A>::mish_limit);
    const A n = e * (e + A(2));
    return v * Cheaper<M, A>::divide_bounded(n, n + A(2));
  }
  return v;
}

template <Act act, class M, class A>
KFC_FN A activate_backward(A g, A v, A slope) {
  if constexpr (act == kRelu) return v <= A(0) ? A(0) : g;
  if constexpr (act == kGelu) {
    const Normal<A> normal = Cheaper<M, A>::normal(v);
    return g * (normal.cdf + v * Constants<A>::inv_sqrt_two_pi * normal.density);
  }
  if constexpr (act == kGeluTanh) {
    v = Cheaper<M, A>::within(v, Constants<A>::gelu_tanh_limit);
    const A slope_of_argument = Constants<A>::two_sqrt_two_over_pi * (A(1) + A(3) * Constants<A>::gelu_cubic * v * v);
    return gated_backward<M>(g, v, gelu_tanh_argument(v), slope_of_argument);
  }
  if constexpr (act == kSilu) {
    v = Cheaper<M, A>::within(v, Constants<A>::gate_limit);
    return gated_backward<M>(g, v, v, A(1));
  }
  if constexpr (act == kQuickGelu) {
    constexpr A slope_of_argument = Constants<A>::quick_gelu_slope;
    v = Cheaper<M, A>::within(v, Constants<A>::gate_limit / slope_of_argument);
    return gated_backward<M>(g, v, slope_of_argument * v, slope_of_argument);
  }
  if constexpr (act == kTanh) return g * (A(1) - v * v);
  if constexpr (act == kSigmoid) return g * (A(1) - v) * v;
  if constexpr (act == kRelu6) return v <= A(0) || v >= A(6) ? A(0) : g;
  if constexpr (act == kHardswish) return v <= A(-3) ? A(0) : (v < A(3) ? g * (v * Constants<A>::third + A(0.5)) : g);
  if constexpr (act == kLeakyRelu) return v > A(0) ? g : g * slope;
  if constexpr (act == kHardsigmoid) return v > A(-3) && v < A(3) ? g * Constants<A>::sixth : A(0);
  if constexpr (act == kExpTwice) return A(2) * g * v;
  if constexpr (act == kMish) {
    // With t = n / (n + 2): t + v (1 - t^2) sigmoid(v), and 1 - t^2 = 4 (1 + e)^2 / (n + 2)^2, sigmoid = e / (1 + e).
    v = Cheaper<M, A>::within(v, Constants<A>::gate_limit);
    const A e = Cheaper<M, A>::at_most(Cheaper<M, A>::exp_bounded(v), Constants<A>::mish_limit);
    const A n = e * (e + A(2));
    const A inverse = Cheaper<M, A>::divide_bounded(A(1), n + A(2));
    return g * (n * inverse + A(4) * v * ((A(1) + e) * inverse) * (e * inverse));
  }
  return g;
}

// The same from the input v, also for the activations whose derivative is written in terms of the output.
template <Act act, class M, class A>
KFC_FN A activate_backward_from_input(A g, A v, A slope) {
  if constexpr (act == kTanh || act == kSigmoid || act == kExpTwice) v = activate<act, M>(v, slope);
  return activate_backward<act, M>(g, v, slope);  // relu and relu6 read the same from v as from y
}

}  // namespace

// Calls BODY with `act` as a compile-time constant, so that the choice is made outside of the loops.
#define KFC_CASE(ACT, ...)   \
  case ACT: {                \
    constexpr Act act = ACT; \
    __VA_ARGS__;             \
    break;                   \
  }
#define KFC_DISPATCH_ACTIVATION(CODE, ...) \
  switch (CODE) {                          \
    KFC_CASE(kRelu, __VA_ARGS__)           \
    KFC_CASE(kGelu, __VA_ARGS__)           \
    KFC_CASE(kGeluTanh, __VA_ARGS__)       \
    KFC_CASE(kSilu, __VA_ARGS__)           \
    KFC_CASE(kTanh, __VA_ARGS__)           \
    KFC_CASE(kSigmoid, __VA_ARGS__)        \
    KFC_CASE(kRelu6, __VA_ARGS__)          \
    KFC_CASE(kHardswish, __VA_ARGS__)      \
    KFC_CASE(kLeakyRelu, __VA_ARGS__)      \
    KFC_CASE(kQuickGelu, __VA_ARGS__)      \
    KFC_CASE(kHardsigmoid, __VA_ARGS__)    \
    KFC_CASE(kExpTwice, __VA_ARGS__)       \
    KFC_CASE(kMish, __VA_ARGS__)           \
    default:                               \
      KFC_CASE_NONE(__VA_ARGS__)           \
  }
#define KFC_CASE_NONE(...)     \
  {                            \
    constexpr Act act = kNone; \
    __VA_ARGS__;               \
  }
