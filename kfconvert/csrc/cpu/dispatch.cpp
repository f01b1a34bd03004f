// Chooses the widest instruction set that this machine and its operating system offer.
// KFCONVERT_CPU_CAPABILITY (generic, avx2 or avx512) asks for a narrower one, so that every version can be
// tested on one machine.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace kfc {

#define KFC_DECLARE(capability)                                     \
  void bias_act_##capability(const BiasAct&, int64_t, int64_t);     \
  void combine_act_##capability(const CombineAct&, int64_t, int64_t); \
  void dropout_act_##capability(const DropoutAct&, int64_t, int64_t); \
  void batch_norm_act_##capability(const BatchNormAct&, int64_t, int64_t); \
  void batch_norm_act_gradients_##capability(const BatchNormAct&, const ChannelTotals&, int64_t, int64_t, int64_t); \
  void bias_act_gradients_##capability(const BiasAct&, const ChannelTotals&, int64_t, int64_t, int64_t); \
  void dropout_act_gradients_##capability(const DropoutAct&, const ChannelTotals&, int64_t, int64_t, int64_t); \
  void sum_partials_##capability(const PartialSums&, int64_t, int64_t); \
  void quantize_##capability(const Quantize&, int64_t, int64_t);    \
  void dequantize_##capability(const Quantize&, int64_t, int64_t); \
  void normalize_image_##capability(const NormalizeImage&, int64_t, int64_t); \
  void rope_##capability(const Rope&, int64_t, int64_t); \
  void softmax_##capability(const Softmax&, int64_t, int64_t);      \
  void cross_entropy_##capability(const CrossEntropy&, int64_t, int64_t); \
  void cross_entropy_total_##capability(const CrossEntropy&);       \
  void reduce_##capability(const Reduce&, int64_t, int64_t);        \
  void reduce_backward_##capability(const ReduceBackward&, int64_t, int64_t); \
  void group_norm_##capability(const GroupNorm&, int64_t, int64_t); \
  void group_norm_backward_##capability(const GroupNormBackward&, int64_t, int64_t); \
  void layer_norm_##capability(const LayerNorm&, int64_t, int64_t); \
  void embedding_layer_norm_##capability(const EmbeddingLayerNorm&, int64_t, int64_t); \
  void layer_norm_backward_##capability(const LayerNormBackward&, int64_t, int64_t, int64_t);
#define KFC_TABLE(capability)                                                                         \
  CpuKernels {                                                                                        \
    #capability, bias_act_##capability, combine_act_##capability, dropout_act_##capability,           \
        batch_norm_act_##capability, bias_act_gradients_##capability, dropout_act_gradients_##capability,  \
        batch_norm_act_gradients_##capability, sum_partials_##capability,                             \
        quantize_##capability, dequantize_##capability, normalize_image_##capability,                 \
        rope_##capability, softmax_##capability,                        \
        cross_entropy_##capability, cross_entropy_total_##capability, reduce_##capability,            \
        reduce_backward_##capability, group_norm_##capability, group_norm_backward_##capability,      \
        layer_norm_##capability, embedding_layer_norm_##capability, layer_norm_backward_##capability  \
  }

KFC_DECLARE(generic)
#ifdef KFC_X86
KFC_DECLARE(avx2)
KFC_DECLARE(avx512)
#endif

namespace {

CpuKernels choose() {
#ifdef KFC_X86
  const char* asked = std::getenv("KFCONVERT_CPU_CAPABILITY");
  const bool at_most_generic = asked != nullptr && std::strcmp(asked, "generic") == 0;
  const bool at_most_avx2 = asked != nullptr && std::strcmp(asked, "avx2") == 0;
  __builtin_cpu_init();
  const bool avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512 && !at_most_generic && !at_most_avx2) return KFC_TABLE(avx512);
  if (avx2 && !at_most_generic) return KFC_TABLE(avx2);
#endif
  return KFC_TABLE(generic);
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels kernels = choose();
  return kernels;
}

}  // namespace kfc

extern "C" __attribute__((visibility("default"))) const char* kfconvert_cpu_capability() {
  return kfc::cpu_kernels().name;
}
