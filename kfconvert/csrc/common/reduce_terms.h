// What is added up by a reduction, once for CPU and CUDA.
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
};

struct Magnitude {
  static constexpr bool binary = false;
  template <class A>
  KFC_FN A of(A x, A) {
    return x < A(0) ? -x : x;
  }
};

struct SquaredDifference {
  static constexpr bool binary = true;
  template <class A>
  KFC_FN A of(A x, A other) {
    return (x - other) * (x - other);
  }
};

}  // namespace

// Calls the code with F as the function of a term.
#define KFC_DISPATCH_TERM(TERM, ...)       \
  switch (TERM) {                          \
    case kfc::Term::identity: {            \
      using F = Identity;                  \
      __VA_ARGS__;                         \
      break;                               \
    }                                      \
    case kfc::Term::square: {              \
      using F = Square;                    \
      __VA_ARGS__;                         \
      break;                               \
    }                                      \
    case kfc::Term::magnitude: {           \
      using F = Magnitude;                 \
      __VA_ARGS__;                         \
      break;                               \
    }                                      \
    case kfc::Term::squared_difference: {  \
      using F = SquaredDifference;         \
      __VA_ARGS__;                         \
      break;                               \
    }                                      \
  }
