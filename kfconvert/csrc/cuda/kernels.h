// The CUDA kernels as host functions: each launches on `stream` (a cudaStream_t) of the current device and
// returns the cudaError_t of its launches. No torch here, so that the .cu files compile in seconds.
#pragma once

#include "../common/arguments.h"
#include "../common/operator_list.h"

namespace kfc {

#define KFC_LAUNCHER(name, Arguments, ...) int launch_##name(const Arguments& a, void* stream);
#define KFC_SUMMING_LAUNCHER(name, Arguments, ...) \
  int launch_##name(const Arguments&, const ChannelTotals&, void* stream);
KFC_KERNELS(KFC_LAUNCHER)
KFC_SUMMING_KERNELS(KFC_SUMMING_LAUNCHER)
#undef KFC_LAUNCHER
#undef KFC_SUMMING_LAUNCHER

// How many rows the partial sums of a summing kernel have.
int64_t channel_shares(const BiasAct& a);
int64_t channel_shares(const BatchNormAct& a);
inline int64_t channel_shares(const DropoutAct& a) { return channel_shares(a.terms); }

// The columns of a part of a row: all, or so many that the parts of all rows fill the device.
int64_t reduce_part(const Reduce& a);

// Sets `part` and `parts`: few long rows, and channels-last images, are divided into so many that they fill the device.
// No parts: images that are too wide.
void plan_group_norm(GroupNorm& a);

// How many rows partial_weight and partial_bias need; the same for the same sizes on the same device.
int64_t layer_norm_backward_partials(const LayerNormBackward& a);
// grad_weight and grad_bias: (cols) in the accumulation type, or null.
int launch_layer_norm_backward(const LayerNormBackward& a, void* grad_weight, void* grad_bias, void* stream);

// Into how many parts the places of the cache are divided, so that they fill the device.
int64_t decode_parts(const DecodeAttention& a);
int launch_decode_attention(const DecodeAttention& a, void* stream);

int launch_next_token(const NextToken& step, void* stream);

// Whether the current device has the tensor cores that the next two functions need.
bool has_tensor_cores();
int launch_skinny_product(const SkinnyProduct& product, void* stream);

// Kernels of 5 and 7 with a stride of 1, as products on tensor cores.
int launch_depthwise_tiles(const DepthwiseConvolution& a, void* stream);
// Kernels of 3, and of 5 with a stride of 2, on the ordinary cores.
int launch_depthwise_rows(const DepthwiseConvolution& a, void* stream);

}  // namespace kfc
