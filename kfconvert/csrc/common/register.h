// Registers every operator of the list for a backend; their schemas are beside their references in kfconvert/ops.
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
#include "operator_list.h"
#include "quantize.h"
#include "reduce.h"
#include "rope.h"
#include "softmax.h"

namespace kfc {

template <class Backend>
void register_operators(torch::stable::detail::StableLibrary& m) {
#define KFC_REGISTER(name) m.impl(#name, TORCH_BOX(&name<Backend>));
#define KFC_REGISTER_WITH_TWIN(name) \
  KFC_REGISTER(name)                 \
  m.impl(#name "_inference", TORCH_BOX(&name<Backend>));
  KFC_OPERATORS(KFC_REGISTER, KFC_REGISTER_WITH_TWIN)
#undef KFC_REGISTER_WITH_TWIN
#undef KFC_REGISTER
}

}  // namespace kfc
