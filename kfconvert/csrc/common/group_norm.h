// Host side of group_norm_act, for any backend: y = act(group_norm(x)), x and y contiguous.
#pragma once

#include "host.h"

namespace kfc {

template <class Backend>
Tensor group_norm_act(const Tensor& x_in, int64_t groups, const OptionalTensor& weight,
                      const OptionalTensor& bias, double eps, int64_t activation, double slope) {
  const char* op = "group_norm_act";
  const Options options = options_of(x_in);
  GroupNorm a{};
  a.dtype = dtype_of(op, options);
  KFC_CHECK(x_in.dim() >= 2, op, "x has shape ", shape_text(x_in), ", expected (N, C, ...)");
  const int64_t channels = x_in.size(1);
  KFC_CHECK(groups > 0 && channels % groups == 0, op, channels, " channels do not make ", groups, " groups");
  std::vector<Tensor> keep;
  const auto affine = [&](const char* name, const OptionalTensor& t) -> const void* {
    if (!t) return nullptr;
    check_same_options(op, name, options, *t);
    KFC_CHECK(t->dim() == 1 && t->size(0) == channels, op, name, " has shape ", shape_text(*t),
              ", but x has ", channels, " channels in dim 1");
    keep.push_back(as_contiguous(*t));
    return keep.back().const_data_ptr();
  };
  a.weight = affine("weight", weight);
  a.bias = affine("bias", bias);
  const Tensor x = as_contiguous(x_in);
  const Tensor y = empty_with_layout_of(x);
  if (x.numel() == 0) return y;
  a.x = x.const_data_ptr();
  a.y = y.mutable_data_ptr();
  a.groups = groups;
  a.rows = x.size(0) * groups;
  a.channels = channels / groups;
  a.inner = x.numel() / (a.rows * a.channels);
  a.eps = eps;
  a.activation = static_cast<int>(activation);
  a.slope = slope;
  Backend::group_norm(a, x);
  return y;
}

}  // namespace kfc
