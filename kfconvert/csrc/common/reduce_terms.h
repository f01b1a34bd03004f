// What is added up by a reduction, once for CPU and CUDA. `derivative` is that with respect to x; with respect to other
// it is the negative.
#pragma once

#include "activation.h"
#include "arguments.h"

namespace {

struct Identity {
  static constexpr bool binary = false;
  template <class A>
  KFC_FN A of(A x, A) {
    return x;
  }
};

struct Square {
  static constexpr bool binary = false;
  template <class A>
  KFC_FN A of(A x, A) {
    return x * x;
  }
  template <class A>
  KFC_FN A derivative(A x, A) {
    return A(2) * x;
  }
};

struct Magnitude {
  static constexpr bool binary = false;
  template <class A>
  KFC_FN A of(A x, A) {
    return x < 0 ? -x : x;  // of vectors as well
  }
  template <class A>
  KFC_FN A derivative(A x, A) {
    return x > A(0) ? A(1) : (x < A(0) ? A(-1) : A(0));  // of a NaN 0, as in ATen
  }
};

struct SquaredDifference {
  static constexpr bool binary = true;
  template <class A>
  KFC_FN A of(A x, A other) {
    return (x - other) * (x - other);
  }
  template <class A>
  KFC_FN A derivative(A x, A other) {
    return A(2) * (x - other);
  }
};

}  // namespace

// Calls the code with F as the function of a term.
#define KFC_TERM_CASE(TERM, FUNCTION, ...) \
  case kfc::Term::TERM: {                  \
    using F = FUNCTION;                    \
    __VA_ARGS__;                           \
    break;                                 \
  }
#define KFC_DIFFERENTIABLE_TERM_CASES(...)         \
  KFC_TERM_CASE(square, Square, __VA_ARGS__)       \
  KFC_TERM_CASE(magnitude, Magnitude, __VA_ARGS__) \
  KFC_TERM_CASE(squared_difference, SquaredDifference, __VA_ARGS__)
#define KFC_DISPATCH_TERM(TERM, ...)               \
  switch (TERM) {                                  \
    KFC_TERM_CASE(identity, Identity, __VA_ARGS__) \
    KFC_DIFFERENTIABLE_TERM_CASES(__VA_ARGS__)     \
  }
// The same for a term of the operators: all but the identity.
#define KFC_DISPATCH_DIFFERENTIABLE_TERM(TERM, ...) \
  switch (TERM) {                                   \
    KFC_DIFFERENTIABLE_TERM_CASES(__VA_ARGS__)      \
    case kfc::Term::identity:                       \
      break;                                        \
  }
