// The CUDA kernels as host functions: each launches on `stream` (a cudaStream_t) of the current device and
// returns the cudaError_t of its launches. No torch here, so that the .cu files compile in seconds.
#pragma once

#include "../common/arguments.h"

namespace kfc {

int launch_bias_act(const BiasAct& a, void* stream);
int launch_combine_act(const CombineAct& a, void* stream);
int launch_dropout_act(const DropoutAct& a, void* stream);
int launch_batch_norm_act(const BatchNormAct& a, void* stream);
int launch_batch_norm_act_gradients(const BatchNormAct& a, const ChannelTotals& sums, void* stream);
// Backward passes with the sums by channel; of prelu, where there are slopes, two.
int launch_bias_act_gradients(const BiasAct& a, const ChannelTotals& sums, void* stream);
int launch_dropout_act_gradients(const DropoutAct& a, const ChannelTotals& sums, void* stream);
// How many rows the partial sums have.
int64_t channel_shares(const BiasAct& a);
int64_t batch_norm_shares(const BatchNormAct& a);
int launch_quantize(const Quantize& a, void* stream);
int launch_dequantize(const Quantize& a, void* stream);
int launch_normalize_image(const NormalizeImage& a, void* stream);
int launch_rope(const Rope& a, void* stream);
int launch_softmax(const Softmax& a, void* stream);
int launch_cross_entropy(const CrossEntropy& a, void* stream);
int launch_reduce(const Reduce& a, void* stream);
int launch_reduce_backward(const ReduceBackward& a, void* stream);
int launch_group_norm(const GroupNorm& a, void* stream);
int launch_group_norm_backward(const GroupNormBackward& a, void* stream);
int launch_layer_norm(const LayerNorm& a, void* stream);
int launch_embedding_layer_norm(const EmbeddingLayerNorm& a, void* stream);

// The columns of a part of a row: all, or so many that the parts of all rows fill the device.
int64_t reduce_part(const Reduce& a);

// How many rows partial_weight and partial_bias need; the same for the same sizes on the same device.
int64_t layer_norm_backward_partials(const LayerNormBackward& a);
// grad_weight and grad_bias: (cols) in the accumulation type, or null.
int launch_layer_norm_backward(const LayerNormBackward& a, void* grad_weight, void* grad_bias, void* stream);

}  // namespace kfc
