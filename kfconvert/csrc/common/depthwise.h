// Convolutions with a filter for each channel, for a backend that has kernels for them.
#pragma once

#include "../common/arguments.h"
#include "host.h"

namespace kfc {

struct Convolution {
  std::vector<int64_t> stride;
  std::vector<int64_t> padding;
  std::vector<int64_t> dilation;
  int64_t groups;
};

inline Tensor empty_channels_last(const Options& o, const std::vector<int64_t>& sizes) {
  const int64_t row = sizes[3] * sizes[1];
  const std::vector<int64_t> strides{sizes[2] * row, 1, row, sizes[1]};
  return empty_strided(o, 4, sizes.data(), strides.data());
}

// Sets all but y and the activation. Returns whether the kernels take the convolution. The memory order of the weight
// selects them: (kernel, kernel, channels), which library calls do not use.
inline bool set_depthwise(DepthwiseConvolution& a, const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                          const Convolution& c) {
  if (weight.dim() != 4 || weight.size(1) != 1 || c.groups != weight.size(0)) return false;
  const int64_t channels = c.groups;
  const int64_t kernel = weight.size(2);
  const int64_t stride = c.stride[0];
  const bool is_square = weight.size(3) == kernel && c.stride[1] == stride && c.dilation[0] == 1 && c.dilation[1] == 1;
  const bool is_known = (kernel == 3 || kernel == 5 || kernel == 7) && stride >= 1 && stride <= (kernel < 7 ? 2 : 1);
  const bool selects = weight.stride(0) == 1 && weight.stride(3) == channels && weight.stride(2) == kernel * channels;
  a.dtype = dtype_of("conv_act", options_of(x));
  if (!is_square || !is_known || !selects || channels % 8 != 0 || channels == 0) return false;
  if ((a.dtype != DType::f16 && a.dtype != DType::bf16) || !is_channels_last(x)) return false;
  a.images = x.size(0);
  a.channels = static_cast<int>(channels);
  a.height = static_cast<int>(x.size(2));
  a.width = static_cast<int>(x.size(3));
  const int64_t out_height = (x.size(2) + 2 * c.padding[0] - kernel) / stride + 1;
  const int64_t out_width = (x.size(3) + 2 * c.padding[1] - kernel) / stride + 1;
  // The kernels count bytes in 32 bits.
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t out = a.images * channels * out_height;
  if (x.numel() == 0 || x.numel() > kMost || out > kMost || out * out_width > kMost) return false;
  a.out_height = static_cast<int>(out_height);
  a.out_width = static_cast<int>(out_width);
  a.kernel = static_cast<int>(kernel);
  a.stride = static_cast<int>(stride);
  a.pad_top = static_cast<int>(c.padding[0]);
  a.pad_left = static_cast<int>(c.padding[1]);
  a.x = x.const_data_ptr();
  a.weight = weight.const_data_ptr();
  a.bias = data_or_null(bias);
  constexpr uintptr_t kWord = 16;
  const auto is_aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % kWord == 0; };
  return is_aligned(a.x) && is_aligned(a.weight) && (!bias || bias->stride(0) == 1) && is_aligned(a.bias);
}

}  // namespace kfc
