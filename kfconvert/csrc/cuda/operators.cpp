// The CUDA backend of the operators: own kernels on the current stream, cuBLASLt and cuDNN for products and
// convolutions.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>

#include "../common/decode_attention.h"
#include "../common/next_token.h"
#include "../common/norm_linear.h"
#include "../common/register.h"
#include "kernels.h"

namespace kfc {
namespace {

void check_cuda(int error, const char* function) {
  char* message = nullptr;
  torch_c10_cuda_check_msg(error, __FILE__, function, __LINE__, true, &message);
  if (message == nullptr) return;
  const std::string text(message);
  torch_c10_cuda_free_error_msg(message);
  throw std::runtime_error(text);
}

// Makes a tensor's device the current one while it lives.
class Cuda {
 public:
  // cuDNN adds the bias in a pass of its own, so that the epilogue does it better.
  static constexpr bool library_fuses_conv_bias = false;

  static constexpr bool has_depthwise = true;

  // Converting them would take a kernel of its own.
  static constexpr bool reads_integer_zero_points = true;

  explicit Cuda(const Tensor& t) : device_(t.get_device_index()), guard_(device_) {}

#define KFC_LAUNCH(name, Arguments, ...)                     \
  static void name(const Arguments& a, const Tensor& like) { \
    const Cuda here(like);                                   \
    check_cuda(launch_##name(a, here.stream()), #name);      \
  }
  KFC_KERNELS(KFC_LAUNCH)
#undef KFC_LAUNCH

#define KFC_LAUNCH_SUMMING(name, Arguments, terms)                               \
  static void name(const Arguments& a, ChannelTotals sums, const Tensor& like) { \
    const Cuda here(like);                                                       \
    const Tensor partials = partial_sums(terms, channel_shares(a), sums, like);  \
    check_cuda(launch_##name(a, sums, here.stream()), #name);                    \
  }
  KFC_SUMMING_KERNELS(KFC_LAUNCH_SUMMING)
#undef KFC_LAUNCH_SUMMING

  static int64_t reduce_part(const Reduce& a, const Tensor& like) {
    const Cuda here(like);
    return kfc::reduce_part(a);
  }

  static void plan_group_norm(GroupNorm& a, const Tensor& like) {
    const Cuda here(like);
    kfc::plan_group_norm(a);
  }

  static int64_t decode_parts(const DecodeAttention& a, const Tensor& like) {
    const Cuda here(like);
    return kfc::decode_parts(a);
  }

  static void decode_attention(const DecodeAttention& a, const Tensor& like) {
    const Cuda here(like);
    check_cuda(launch_decode_attention(a, here.stream()), "decode_attention");
  }

  static bool has_tensor_cores(const Tensor& like) {
    const Cuda here(like);
    return kfc::has_tensor_cores();
  }

  static void skinny_product(const SkinnyProduct& a, const Tensor& like) {
    const Cuda here(like);
    check_cuda(launch_skinny_product(a, here.stream()), "skinny_product");
  }

  static void depthwise(const DepthwiseConvolution& a, const Tensor& like) {
    const Cuda here(like);
    const auto launch = a.kernel > 3 && a.stride == 1 ? launch_depthwise_tiles : launch_depthwise_rows;
    check_cuda(launch(a, here.stream()), "depthwise");
  }

  static void next_token(const NextToken& a, const Tensor& like) {
    const Cuda here(like);
    check_cuda(launch_next_token(a, here.stream()), "next_token");
  }

  static int64_t layer_norm_partials(const LayerNormBackward& a, const Tensor& like) {
    const Cuda here(like);
    return layer_norm_backward_partials(a);
  }

  static void layer_norm_backward(const LayerNormBackward& a, void* grad_weight, void* grad_bias, const Tensor& like) {
    const Cuda here(like);
    check_cuda(launch_layer_norm_backward(a, grad_weight, grad_bias, here.stream()), "layer_norm_backward");
  }

  static void linear(const Tensor& y, const Tensor& x, const Tensor& weight_t, const OptionalTensor& bias) {
    if (bias) {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(y.get(), bias->get(), x.get(), weight_t.get(), 1.0, 1.0));
    } else {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_mm_out(y.get(), x.get(), weight_t.get()));
    }
  }

  // relu is in cuBLASLt's epilogue. Its GELU is the tanh form, which is never used here.
  // Without inputs to sum over ATen returns the bias as it is, relu forgotten: nothing, so that the epilogue runs.
  static OptionalTensor linear_relu(const Tensor& x, const Tensor& weight_t, const Tensor& bias) {
    if (weight_t.size(0) == 0) return std::nullopt;
    AtenTensorHandle y;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_cuda__addmm_activation(bias.get(), x.get(), weight_t.get(), 1.0, 1.0, 0, &y));
    return Tensor(y);
  }

  static Tensor convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Convolution& c) {
    AtenTensorHandle bias_handle = bias ? bias->get() : nullptr;
    AtenTensorHandle y;
    const int64_t n = static_cast<int64_t>(c.stride.size());
    const std::vector<int64_t> output_padding(c.stride.size(), 0);
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_convolution(
        x.get(), weight.get(), bias ? &bias_handle : nullptr, c.stride.data(), n, c.padding.data(), n,
        c.dilation.data(), n, 0, output_padding.data(), n, c.groups, &y));
    return Tensor(y);
  }

  // cudnn_convolution_relu and cudnn_convolution_add_relu; nothing where cuDNN has no such engine.
  static OptionalTensor conv_relu(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                  const OptionalTensor& residual, const Convolution& c) {
    if (weight.dim() != 4 || dtype_of("conv_act", options_of(x)) == DType::f64) return std::nullopt;
    using torch::stable::detail::from;
    const auto list = [](const std::vector<int64_t>& v) {
      return from(torch::headeronly::IntHeaderOnlyArrayRef(v.data(), v.size()));
    };
    const OptionalTensor given_bias = bias;
    int32_t failed;
    StableIValue result;
    if (residual) {
      StableIValue stack[] = {from(x),        from(weight),    from(*residual),  from(std::nullopt), from(given_bias),
                              list(c.stride), list(c.padding), list(c.dilation), from(c.groups)};
      failed = torch_call_dispatcher("aten::cudnn_convolution_add_relu", "", stack, TORCH_ABI_VERSION);
      result = stack[0];
    } else {
      StableIValue stack[] = {from(x),         from(weight),     from(given_bias), list(c.stride),
                              list(c.padding), list(c.dilation), from(c.groups)};
      failed = torch_call_dispatcher("aten::cudnn_convolution_relu", "", stack, TORCH_ABI_VERSION);
      result = stack[0];
    }
    // libtorch has written the reason to stderr; the convolution with an epilogue of our own follows.
    if (failed != TORCH_SUCCESS) return std::nullopt;
    return torch::stable::detail::to<Tensor>(result);
  }

 private:
  // Memory for the partial sums.
  static Tensor partial_sums(const BiasAct& a, int64_t shares, ChannelTotals& sums, const Tensor& like) {
    sums.shares = shares;
    const Options options = accumulator(options_of(like), a.dtype);
    const Tensor partials = empty(options, {kMostTotals, sums.shares, a.channels});
    const int64_t bytes = sums.shares * a.channels * (a.dtype == DType::f64 ? 8 : 4);
    char* memory = static_cast<char*>(partials.mutable_data_ptr());
    for (int k = 0; k < kMostTotals; ++k) sums.partials[k] = memory + k * bytes;
    return partials;
  }

  void* stream() const {
    void* stream = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
    return stream;
  }

  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
};

}  // namespace
}  // namespace kfc

STABLE_TORCH_LIBRARY_IMPL(kfconvert, CUDA, m) {
  kfc::register_operators<kfc::Cuda>(m);
  // Steps of generation are recorded on CUDA only.
  m.impl("decode_attention_", TORCH_BOX(&kfc::decode_attention_<kfc::Cuda>));
  m.impl("next_token_", TORCH_BOX(&kfc::next_token_<kfc::Cuda>));
  // The libraries of the CPU do well with few rows.
  m.impl("skinny_linear", TORCH_BOX(&kfc::skinny_linear<kfc::Cuda>));
  m.impl("quantized_linear", TORCH_BOX(&kfc::quantized_linear<kfc::Cuda>));
  m.impl("norm_linear", TORCH_BOX(&kfc::norm_linear<kfc::Cuda>));
}
