// Host side of fold_batch_norm, for any backend: scale = weight / sqrt(variance + eps), shift = bias + (before - mean) *
// scale, with which a batch norm in eval mode of x + before is x * scale + shift.
#pragma once

#include "host.h"

namespace kfc {

// All tensors (channels) and of one dtype; scale and shift in its accumulation type.
template <class Backend>
std::tuple<Tensor, Tensor> fold_batch_norm(const Tensor& mean_in, const Tensor& variance_in,
                                           const OptionalTensor& weight_in, const OptionalTensor& bias_in,
                                           const OptionalTensor& before_in, double eps) {
  const char* op = "fold_batch_norm";
  Options options = options_of(mean_in);
  FoldBatchNorm a{};
  a.dtype = dtype_of(op, options);
  KFC_CHECK(mean_in.dim() == 1, op, "mean has shape ", shape_text(mean_in), ", expected (channels,)");
  const Tensor mean = as_contiguous(mean_in);
  std::vector<Tensor> keep;
  const auto channel_data = [&](const char* name, const OptionalTensor& t) -> const void* {
    if (!t) return nullptr;
    check_same_options(op, name, options, *t);
    check_same_shape(op, name, mean, *t);
    keep.push_back(as_contiguous(*t));
    return keep.back().const_data_ptr();
  };
  a.mean = mean.const_data_ptr();
  a.variance = channel_data("variance", variance_in);
  a.weight = channel_data("weight", weight_in);
  a.bias = channel_data("bias", bias_in);
  a.before = channel_data("before", before_in);
  a.channels = mean.numel();
  a.eps = eps;
  if (a.dtype != DType::f64) options.dtype = aoti_torch_dtype_float32();
  const std::vector<int64_t> sizes{a.channels};
  Tensor scale = empty(options, sizes);
  Tensor shift = empty(options, sizes);
  a.scale = scale.mutable_data_ptr();
  a.shift = shift.mutable_data_ptr();
  if (a.channels > 0) Backend::fold_batch_norm(a, mean);
  return {std::move(scale), std::move(shift)};
}

}  // namespace kfc
