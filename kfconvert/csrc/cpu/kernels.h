// The CPU kernels as a table of functions, built once for each instruction set and chosen when the library
// loads. Each works on a range of elements or rows, so that the caller decides on the threads.
#pragma once

#include "../common/arguments.h"

namespace kfc {

struct CpuKernels {
  const char* name;
  void (*bias_act)(const BiasAct&, int64_t begin, int64_t end);
  void (*combine_act)(const CombineAct&, int64_t begin, int64_t end);
  void (*dropout_act)(const DropoutAct&, int64_t begin, int64_t end);  // begin: a multiple of 4
  void (*batch_norm_act)(const BatchNormAct&, int64_t begin, int64_t end);
  // Add what a share of the elements has to the row `share` of sums.partials, which must start as zeros.
  void (*bias_act_gradients)(const BiasAct&, const ChannelTotals& sums, int64_t begin, int64_t end, int64_t share);
  void (*dropout_act_gradients)(const DropoutAct&, const ChannelTotals& sums, int64_t begin, int64_t end,
                                int64_t share);  // begin: a multiple of 4
  void (*batch_norm_act_gradients)(const BatchNormAct&, const ChannelTotals& sums, int64_t begin, int64_t end,
                                   int64_t share);
  void (*sum_partials)(const PartialSums&, int64_t begin, int64_t end);  // of columns
  void (*quantize)(const Quantize&, int64_t begin, int64_t end);
  void (*dequantize)(const Quantize&, int64_t begin, int64_t end);
  void (*normalize_image)(const NormalizeImage&, int64_t begin, int64_t end);  // of pixels
  void (*rope)(const Rope&, int64_t begin, int64_t end);  // of rows
  void (*softmax)(const Softmax&, int64_t begin, int64_t end);
  void (*cross_entropy)(const CrossEntropy&, int64_t begin, int64_t end);
  void (*cross_entropy_total)(const CrossEntropy&);
  void (*reduce)(const Reduce&, int64_t begin, int64_t end);  // of rows * parts
  void (*reduce_backward)(const ReduceBackward&, int64_t begin, int64_t end);  // of elements
  void (*group_norm)(const GroupNorm&, int64_t begin, int64_t end);
  // Without grad_weight and grad_bias, which are the sums of the sums.
  void (*group_norm_backward)(const GroupNormBackward&, int64_t begin, int64_t end);
  void (*layer_norm)(const LayerNorm&, int64_t begin, int64_t end);
  void (*embedding_layer_norm)(const EmbeddingLayerNorm&, int64_t begin, int64_t end);  // of rows
  // Adds the rows' shares of grad_weight and grad_bias into partial number `partial`, which must start as
  // zeros.
  void (*layer_norm_backward)(const LayerNormBackward&, int64_t begin, int64_t end, int64_t partial);
};

const CpuKernels& cpu_kernels();

}  // namespace kfc

#define KFC_JOIN_(a, b)          a##_##b
#define KFC_JOIN(a, b)           KFC_JOIN_(a, b)
#define KFC_FOR_CAPABILITY(name) KFC_JOIN(name, KFC_CAPABILITY)
