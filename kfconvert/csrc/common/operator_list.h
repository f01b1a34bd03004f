// The one list of operators and of the kernels behind them. Generated from it are: the registration of each operator
// with its `_inference` twin (common/register.h), the table of CPU kernels and its three versions (cpu/kernels.h,
// cpu/dispatch.cpp), the declarations of the CUDA launchers (cuda/kernels.h), and in both operators.cpp the functions
// that do no more than call a kernel. The structs are those of arguments.h.
#pragma once

// OPERATOR(name): the function template `name<Backend>` of a header in common/, under its own name. TWIN(name): it has
// a twin, the same function under a name that has no autograd layer (kfconvert/ops/registration.py).
#define KFC_OPERATORS(OPERATOR, TWIN) \
  TWIN(batch_norm_act)                \
  OPERATOR(batch_norm_act_gradients)  \
  TWIN(bias_act)                      \
  OPERATOR(bias_act_)                 \
  OPERATOR(bias_act_backward)         \
  OPERATOR(bias_act_gradients)        \
  TWIN(combine_act)                   \
  OPERATOR(combine_act_backward)      \
  TWIN(conv_act)                      \
  TWIN(cross_entropy)                 \
  OPERATOR(cross_entropy_backward)    \
  TWIN(dropout_act)                   \
  OPERATOR(dropout_act_backward)      \
  OPERATOR(dropout_act_gradients)     \
  OPERATOR(embedding_layer_norm)      \
  TWIN(group_norm_act)                \
  OPERATOR(group_norm_act_training)   \
  OPERATOR(group_norm_act_backward)   \
  TWIN(layer_norm_act)                \
  TWIN(add_layer_norm_act)            \
  OPERATOR(layer_norm_act_training)   \
  OPERATOR(layer_norm_act_backward)   \
  TWIN(linear_act)                    \
  OPERATOR(normalize_image)           \
  TWIN(prelu_bias)                    \
  OPERATOR(prelu_bias_gradients)      \
  OPERATOR(quantize_int8)             \
  OPERATOR(dequantize_int8)           \
  TWIN(reduce_rows)                   \
  OPERATOR(reduce_rows_backward)      \
  TWIN(rms_norm_act)                  \
  TWIN(add_rms_norm_act)              \
  OPERATOR(rms_norm_act_training)     \
  OPERATOR(rms_norm_act_backward)     \
  TWIN(rope)                          \
  TWIN(scale_shift_act)               \
  TWIN(softmax)                       \
  OPERATOR(softmax_backward)

// KERNEL(name, Arguments, count, each): a kernel of both backends whose work falls into `count` pieces that do not
// depend on each other (elements, rows, pixels) of `each` elements, by which the CPU's threads divide it.
#define KFC_KERNELS(KERNEL)                                                                 \
  KERNEL(batch_norm_act, BatchNormAct, a.terms.numel, 1)                                    \
  KERNEL(bias_act, BiasAct, a.numel, 1)                                                     \
  KERNEL(combine_act, CombineAct, a.numel, 1)                                               \
  KERNEL(cross_entropy, CrossEntropy, a.rows, a.cols)                                       \
  KERNEL(dequantize, Quantize, a.numel, 1)                                                  \
  KERNEL(dropout_act, DropoutAct, a.terms.numel, 1)                                         \
  KERNEL(embedding_layer_norm, EmbeddingLayerNorm, a.norm.rows, a.norm.cols)                \
  KERNEL(group_norm, GroupNorm, a.rows, a.channels* a.inner)                                \
  KERNEL(group_norm_backward, GroupNormBackward, a.rows, a.channels* a.inner)               \
  KERNEL(layer_norm, LayerNorm, a.rows, a.cols)                                             \
  KERNEL(normalize_image, NormalizeImage, a.sizes[0] * a.sizes[1] * a.sizes[2], a.channels) \
  KERNEL(quantize, Quantize, a.numel, 1)                                                    \
  KERNEL(reduce, Reduce, a.rows* a.parts, a.part)                                           \
  KERNEL(reduce_backward, ReduceBackward, a.rows* a.cols, 1)                                \
  KERNEL(rope, Rope, a.rows, 2 * a.half)                                                    \
  KERNEL(softmax, Softmax, a.rows, a.cols)

// SUMMING(name, Arguments, terms): a backward pass that adds up sums by channel on its way, each share of the elements
// its own; `terms` is the BiasAct that has their sizes.
#define KFC_SUMMING_KERNELS(SUMMING)                       \
  SUMMING(batch_norm_act_gradients, BatchNormAct, a.terms) \
  SUMMING(bias_act_gradients, BiasAct, a)                  \
  SUMMING(dropout_act_gradients, DropoutAct, a.terms)
