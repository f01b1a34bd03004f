// Host side of act_mul, for any backend: y = act(gate) * up and its backward. gate and up may be views of one
// packed tensor: rows that lie apart are read where they are.
#pragma once

#include "host.h"

namespace kfc {

// How many of the last dimensions of t lie in memory as those of a contiguous tensor.
inline int64_t contiguous_dims(const Tensor& t) {
  int64_t expected = 1;
  int64_t first = t.dim();
  while (first > 0 && (t.size(first - 1) == 1 || t.stride(first - 1) == expected)) {
    --first;
    expected *= t.size(first);
  }
  return t.dim() - first;
}

// How far apart the rows made of the last `inner` dimensions lie, or -1 where no single distance holds.
inline int64_t row_stride(const Tensor& t, int64_t inner) {
  int64_t stride = 0;
  int64_t expected = 0;
  bool found = false;
  for (int64_t i = t.dim() - inner - 1; i >= 0; --i) {
    if (t.size(i) == 1) continue;
    if (!found) {
      stride = t.stride(i);
      found = true;
    } else if (t.stride(i) != expected) {
      return -1;
    }
    expected = t.stride(i) * t.size(i);
  }
  return stride;
}

// Describes gate and up as rows; false where they do not lie so.
inline bool set_rows(ActMul& a, const Tensor& gate, const Tensor& up) {
  const int64_t gate_dims = contiguous_dims(gate);
  const int64_t up_dims = contiguous_dims(up);
  const int64_t inner = gate_dims < up_dims ? gate_dims : up_dims;
  if (gate.dim() > 0 && inner == 0) return false;
  a.gate_stride = row_stride(gate, inner);
  a.up_stride = row_stride(up, inner);
  a.cols = 1;
  for (int64_t i = gate.dim() - inner; i < gate.dim(); ++i) a.cols *= gate.size(i);
  a.rows = a.cols > 0 ? gate.numel() / a.cols : 0;
  a.gate = gate.const_data_ptr();
  a.up = up.const_data_ptr();
  return a.gate_stride >= 0 && a.up_stride >= 0;
}

// `keep` holds the copies that the pointers need.
inline ActMul act_mul_arguments(const char* op, const Tensor& gate, const Tensor& up, int64_t activation,
                                double slope, std::vector<Tensor>& keep) {
  const Options options = options_of(gate);
  ActMul a{};
  a.dtype = dtype_of(op, options);
  a.activation = static_cast<int>(activation);
  a.slope = slope;
  check_same_options(op, "up", options, up);
  check_same_shape(op, "up", gate, up);
  if (!set_rows(a, gate, up)) {
    keep = {as_contiguous(gate), as_contiguous(up)};
    set_rows(a, keep[0], keep[1]);
  }
  return a;
}

inline Tensor empty_contiguous_like(const Tensor& t) {
  const auto sizes = t.sizes();
  return empty(options_of(t), std::vector<int64_t>(sizes.begin(), sizes.end()));
}

template <class Backend>
Tensor act_mul(const Tensor& gate, const Tensor& up, int64_t activation, double slope) {
  std::vector<Tensor> keep;
  ActMul a = act_mul_arguments("act_mul", gate, up, activation, slope, keep);
  Tensor y = empty_contiguous_like(gate);
  a.y = y.mutable_data_ptr();
  if (y.numel() > 0) Backend::act_mul(a, gate);
  return y;
}

// The gradients of gate and of up.
template <class Backend>
std::tuple<Tensor, Tensor> act_mul_backward(const Tensor& grad_in, const Tensor& gate, const Tensor& up,
                                            int64_t activation, double slope) {
  const char* op = "act_mul_backward";
  std::vector<Tensor> keep;
  ActMul a = act_mul_arguments(op, gate, up, activation, slope, keep);
  check_same_options(op, "grad", options_of(gate), grad_in);
  check_same_shape(op, "grad", gate, grad_in);
  const Tensor grad = as_contiguous(grad_in);
  Tensor grad_gate = empty_contiguous_like(gate);
  Tensor grad_up = empty_contiguous_like(gate);
  a.grad = grad.const_data_ptr();
  a.y = grad_gate.mutable_data_ptr();
  a.grad_up = grad_up.mutable_data_ptr();
  if (grad.numel() > 0) Backend::act_mul(a, gate);
  return {std::move(grad_gate), std::move(grad_up)};
}

}  // namespace kfc
