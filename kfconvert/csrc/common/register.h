// The list of operators, once for every backend; their schemas are beside their references in kfconvert/ops.
#pragma once

#include "batch_norm_act.h"
#include "channel_gradients.h"
#include "combine_act.h"
#include "cross_entropy.h"
#include "dropout_act.h"
#include "embedding_layer_norm.h"
#include "group_norm.h"
#include "layer_norm.h"
#include "library_ops.h"
#include "normalize_image.h"
#include "quantize.h"
#include "reduce.h"
#include "rope.h"
#include "softmax.h"

namespace kfc {

// `*_inference` are the same kernels under names that have no autograd layer (kfconvert/ops/registration.py).
template <class Backend>
void register_operators(torch::stable::detail::StableLibrary& m) {
  m.impl("batch_norm_act", TORCH_BOX(&batch_norm_act<Backend>));
  m.impl("batch_norm_act_inference", TORCH_BOX(&batch_norm_act<Backend>));
  m.impl("batch_norm_act_gradients", TORCH_BOX(&batch_norm_act_gradients<Backend>));
  m.impl("bias_act", TORCH_BOX(&bias_act<Backend>));
  m.impl("bias_act_inference", TORCH_BOX(&bias_act<Backend>));
  m.impl("bias_act_", TORCH_BOX(&bias_act_<Backend>));
  m.impl("bias_act_backward", TORCH_BOX(&bias_act_backward<Backend>));
  m.impl("bias_act_gradients", TORCH_BOX(&bias_act_gradients<Backend>));
  m.impl("combine_act", TORCH_BOX(&combine_act<Backend>));
  m.impl("combine_act_inference", TORCH_BOX(&combine_act<Backend>));
  m.impl("combine_act_backward", TORCH_BOX(&combine_act_backward<Backend>));
  m.impl("dropout_act", TORCH_BOX(&dropout_act<Backend>));
  m.impl("dropout_act_inference", TORCH_BOX(&dropout_act<Backend>));
  m.impl("dropout_act_backward", TORCH_BOX(&dropout_act_backward<Backend>));
  m.impl("dropout_act_gradients", TORCH_BOX(&dropout_act_gradients<Backend>));
  m.impl("normalize_image", TORCH_BOX(&normalize_image<Backend>));
  m.impl("prelu_bias", TORCH_BOX(&prelu_bias<Backend>));
  m.impl("prelu_bias_inference", TORCH_BOX(&prelu_bias<Backend>));
  m.impl("prelu_bias_gradients", TORCH_BOX(&prelu_bias_gradients<Backend>));
  m.impl("quantize_int8", TORCH_BOX(&quantize_int8<Backend>));
  m.impl("dequantize_int8", TORCH_BOX(&dequantize_int8<Backend>));
  m.impl("reduce_rows", TORCH_BOX(&reduce_rows<Backend>));
  m.impl("reduce_rows_inference", TORCH_BOX(&reduce_rows<Backend>));
  m.impl("reduce_rows_backward", TORCH_BOX(&reduce_rows_backward<Backend>));
  m.impl("rope", TORCH_BOX(&rope<Backend>));
  m.impl("rope_inference", TORCH_BOX(&rope<Backend>));
  m.impl("scale_shift_act", TORCH_BOX(&scale_shift_act<Backend>));
  m.impl("scale_shift_act_inference", TORCH_BOX(&scale_shift_act<Backend>));
  m.impl("linear_act", TORCH_BOX(&linear_act<Backend>));
  m.impl("linear_act_inference", TORCH_BOX(&linear_act<Backend>));
  m.impl("conv_act", TORCH_BOX(&conv_act<Backend>));
  m.impl("conv_act_inference", TORCH_BOX(&conv_act<Backend>));
  m.impl("embedding_layer_norm", TORCH_BOX(&embedding_layer_norm<Backend>));
  m.impl("group_norm_act", TORCH_BOX(&group_norm_act<Backend>));
  m.impl("group_norm_act_inference", TORCH_BOX(&group_norm_act<Backend>));
  m.impl("group_norm_act_training", TORCH_BOX(&group_norm_act_training<Backend>));
  m.impl("group_norm_act_backward", TORCH_BOX(&group_norm_act_backward<Backend>));
  m.impl("layer_norm_act", TORCH_BOX(&layer_norm_act<Backend>));
  m.impl("layer_norm_act_inference", TORCH_BOX(&layer_norm_act<Backend>));
  m.impl("add_layer_norm_act", TORCH_BOX(&add_layer_norm_act<Backend>));
  m.impl("add_layer_norm_act_inference", TORCH_BOX(&add_layer_norm_act<Backend>));
  m.impl("layer_norm_act_training", TORCH_BOX(&layer_norm_act_training<Backend>));
  m.impl("layer_norm_act_backward", TORCH_BOX(&layer_norm_act_backward<Backend>));
  m.impl("softmax", TORCH_BOX(&softmax<Backend>));
  m.impl("softmax_inference", TORCH_BOX(&softmax<Backend>));
  m.impl("softmax_backward", TORCH_BOX(&softmax_backward<Backend>));
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy<Backend>));
  m.impl("cross_entropy_inference", TORCH_BOX(&cross_entropy<Backend>));
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward<Backend>));
  m.impl("rms_norm_act", TORCH_BOX(&rms_norm_act<Backend>));
  m.impl("rms_norm_act_inference", TORCH_BOX(&rms_norm_act<Backend>));
  m.impl("add_rms_norm_act", TORCH_BOX(&add_rms_norm_act<Backend>));
  m.impl("add_rms_norm_act_inference", TORCH_BOX(&add_rms_norm_act<Backend>));
  m.impl("rms_norm_act_training", TORCH_BOX(&rms_norm_act_training<Backend>));
  m.impl("rms_norm_act_backward", TORCH_BOX(&rms_norm_act_backward<Backend>));
}

}  // namespace kfc
