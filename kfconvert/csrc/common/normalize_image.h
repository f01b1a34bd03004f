// Host side of normalize_image, for any backend: (images, height, width, channels) of bytes, in any strides.
#pragma once

#include <algorithm>

#include "quantize.h"

namespace kfc {

// Makes one dimension of two, `outer` and the one after it, where their elements follow each other evenly.
inline void merge(NormalizeImage& a, int outer) {
  int64_t* sizes = a.sizes + outer;
  int64_t* strides = a.strides + outer;
  if (sizes[1] == 1) strides[1] = strides[0];
  if (sizes[0] == 1 || strides[0] == sizes[1] * strides[1]) {
    sizes[1] *= sizes[0];
    sizes[0] = 1;
  }
}

// As few and as long rows as there can be. Images follow each other in the result only if it has no planes.
inline void merge_rows(NormalizeImage& a) {
  if (a.channels == 1) {  // planes and pixels are the same
    a.channels_last = true;
    a.channel_stride = 1;
  }
  merge(a, 1);
  if (!a.channels_last) return;
  merge(a, 0);
  merge(a, 1);
}

// (..., height, width, channels) to (..., channels, height, width)
inline void move_channels(std::vector<int64_t>& sizes) { std::rotate(sizes.end() - 3, sizes.end() - 1, sizes.end()); }

// mean and deviation: both tensors, or neither: then the values of up to kFewChannels channels. `like`: an empty tensor
// of the dtype to be returned.
template <class Backend>
Tensor normalize_image(const Tensor& image, const OptionalTensor& mean, const OptionalTensor& deviation,
                       std::vector<double> mean_values, std::vector<double> deviation_values, const Tensor& like,
                       bool channels_last) {
  const char* op = "normalize_image";
  Options options = options_of(image);
  KFC_CHECK(options.dtype == aoti_torch_dtype_uint8(), op, "expected uint8");
  KFC_CHECK(image.dim() == 3 || image.dim() == 4, op, "image has shape ", shape_text(image),
            ", expected (H, W, C) or (N, H, W, C)");
  options.dtype = options_of(like).dtype;
  NormalizeImage a{};
  a.dtype = dtype_of(op, options);
  a.channels_last = channels_last;
  const int64_t last = image.dim() - 1;
  a.channels = image.size(last);
  a.channel_stride = image.stride(last);
  for (int64_t i = 0; i < 3; ++i) {
    const int64_t dim = last - 3 + i;
    a.sizes[i] = dim < 0 ? 1 : image.size(dim);
    a.strides[i] = dim < 0 ? 0 : image.stride(dim);
  }
  KFC_CHECK(mean.has_value() == deviation.has_value(), op, "mean and std must both be tensors or both be numbers");
  std::vector<Tensor> keep;
  a.mean = channel_values(op, "mean", image, a.dtype, mean, a.channels, false, keep);
  a.deviation = channel_values(op, "std", image, a.dtype, deviation, a.channels, false, keep);
  if (!mean) {
    const size_t channels = static_cast<size_t>(a.channels);
    KFC_CHECK(channels <= kFewChannels && mean_values.size() == channels && deviation_values.size() == channels, op,
              "expected a mean and a std for each of ", a.channels, " channels, in tensors for more than ",
              kFewChannels);
    std::copy(mean_values.begin(), mean_values.end(), a.mean_values);
    std::copy(deviation_values.begin(), deviation_values.end(), a.deviation_values);
  }
  const auto given = image.sizes();
  std::vector<int64_t> sizes(given.begin(), given.end());
  std::vector<int64_t> strides = contiguous_strides(sizes);
  move_channels(sizes);
  if (channels_last) {
    move_channels(strides);
  } else {
    strides = contiguous_strides(sizes);
  }
  Tensor y = empty_strided(options, image.dim(), sizes.data(), strides.data());
  a.y = y.mutable_data_ptr();
  a.image = static_cast<const uint8_t*>(image.const_data_ptr());
  merge_rows(a);
  if (y.numel() > 0) Backend::normalize_image(a, image);
  return y;
}

}  // namespace kfc
