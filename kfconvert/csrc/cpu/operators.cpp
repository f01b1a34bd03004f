// The CPU backend of the operators: threads over the kernels of cpu/kernels.h, ATen for products and
// convolutions.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <cstring>

#include "../common/register.h"
#include "kernels.h"

namespace kfc {
namespace {

// Below this many elements a thread costs more than it saves (ATen's own elementwise kernels use the same
// number).
constexpr int64_t kElementsPerThread = 32768;

// Calls the kernel for parts of 0 to count, one a thread, each of at least `grain`.
template <class Arguments>
void split(Pointer<RangeKernel<Arguments>> kernel, const Arguments& a, int64_t count, int64_t grain) {
  if (count <= grain) return kernel(a, 0, count);
  torch::stable::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
}

// How many pieces of so many elements a thread is worth.
int64_t pieces_per_thread(int64_t each) { return (kElementsPerThread - 1) / (each > 0 ? each : 1) + 1; }

// The kernels of the list divided among threads, with nothing before and nothing after.
struct Divided {
#define KFC_DIVIDED(name, Arguments, count, each) \
  static void name(const Arguments& a, const Tensor&) { split(cpu_kernels().name, a, count, pieces_per_thread(each)); }
  KFC_KERNELS(KFC_DIVIDED)
#undef KFC_DIVIDED
};

// A function that stands here hides the one of Divided.
struct Cpu : Divided {
  static constexpr bool library_fuses_conv_bias = true;
  static constexpr bool has_depthwise = false;
  static constexpr bool reads_integer_zero_points = false;

  explicit Cpu(const Tensor&) {}

  static void dropout_act(const DropoutAct& a, const Tensor&) {
    const CpuKernels& kernels = cpu_kernels();
    const int64_t numel = a.terms.numel;
    if (numel <= kElementsPerThread) return kernels.dropout_act(a, 0, numel);
    // Four elements share a block of random words.
    torch::stable::parallel_for(0, (numel + 3) / 4, kElementsPerThread / 4, [&](int64_t begin, int64_t end) {
      kernels.dropout_act(a, 4 * begin, 4 * end < numel ? 4 * end : numel);
    });
  }

  // Nothing where there is no total.
  static void sum_partials(const PartialSums& a) {
    if (a.total == nullptr) return;
    split(cpu_kernels().sum_partials, a, a.cols, pieces_per_thread(a.count));
  }

  // kernel(begin, end, share) for each of the shares of the elements, then the sums of their sums.
  template <class Kernel>
  static void sum_by_channel(const BiasAct& a, ChannelTotals sums, Kernel kernel) {
    const int64_t wanted = (a.numel + kElementsPerThread - 1) / kElementsPerThread;
    const int64_t threads = torch::stable::get_num_threads();
    sums.shares = wanted < threads ? wanted : threads;
    const int64_t row = sums.shares * a.channels;
    std::vector<double> partials(static_cast<size_t>(kMostTotals * row), 0.0);
    for (int k = 0; k < kMostTotals; ++k) sums.partials[k] = partials.data() + k * row;
    if (sums.shares > 0) {
      const int64_t fours = (a.numel + 3) / 4;  // these share random words
      const int64_t share = 4 * ((fours + sums.shares - 1) / sums.shares);
      torch::stable::parallel_for(0, sums.shares, 1, [&](int64_t first, int64_t last) {
        for (int64_t s = first; s < last; ++s) {
          const int64_t end = (s + 1) * share < a.numel ? (s + 1) * share : a.numel;
          if (s * share < end) kernel(sums, s * share, end, s);
        }
      });
    }
    for (int k = 0; k < kMostTotals; ++k) {
      sum_partials({sums.totals[k], sums.partials[k], sums.shares, a.channels, DType::f64, sums.dtype});
    }
  }

#define KFC_SUM_BY_CHANNEL(name, Arguments, terms)                                                            \
  static void name(const Arguments& a, const ChannelTotals& totals, const Tensor&) {                          \
    sum_by_channel(terms, totals, [&](const ChannelTotals& sums, int64_t begin, int64_t end, int64_t share) { \
      cpu_kernels().name(a, sums, begin, end, share);                                                         \
    });                                                                                                       \
  }
  KFC_SUMMING_KERNELS(KFC_SUM_BY_CHANNEL)
#undef KFC_SUM_BY_CHANNEL

  // Of a fixed length, so that the result does not depend on the number of threads.
  static int64_t reduce_part(const Reduce& a, const Tensor&) {
    return a.cols < kElementsPerThread ? a.cols : kElementsPerThread;
  }

  // The kernels read and write where the targets say.
  static void check_targets(const CrossEntropy& a) {
    int64_t least = 0;
    int64_t most = 0;
    bool any = false;
    for (int64_t row = 0; row < a.rows; ++row) {
      const int64_t target = a.target[row];
      if (target == a.ignored) continue;
      if (!any || target < least) least = target;
      if (!any || target > most) most = target;
      any = true;
    }
    KFC_CHECK(!any || (least >= 0 && most < a.cols), "cross_entropy", "target holds ", least, " to ", most, ", x has ",
              a.cols, " classes");
  }

  static void cross_entropy(const CrossEntropy& a, const Tensor& like) {
    check_targets(a);
    Divided::cross_entropy(a, like);
    if (a.result != nullptr) cpu_kernels().cross_entropy_total(a);
  }

  // The kernel reads whole rows, contiguous.
  static void plan_group_norm(GroupNorm&, const Tensor&) {}

  static void group_norm_backward(const GroupNormBackward& a, const Tensor& like) {
    Divided::group_norm_backward(a, like);
    const int64_t images = a.rows / a.groups;
    const DType wide = a.dtype == DType::f64 ? DType::f64 : DType::f32;
    sum_partials({a.grad_weight, a.sums_weight, images, a.groups * a.channels, wide, a.dtype});
    sum_partials({a.grad_bias, a.sums_bias, images, a.groups * a.channels, wide, a.dtype});
  }

  // The kernel reads where the ids say.
  static void check_ids(const char* name, const char* table, const RowIds& ids, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t id = id_at(ids, row);
      KFC_CHECK(id >= 0 && id < ids.count, "embedding_layer_norm", name, " holds ", id, ", ", table, " has ", ids.count,
                " rows");
    }
  }

  static void embedding_layer_norm(const EmbeddingLayerNorm& a, const Tensor& like) {
    check_ids("ids", "word", a.ids, a.norm.rows);
    if (a.token_type_ids.data != nullptr) check_ids("token_type_ids", "token_type", a.token_type_ids, a.norm.rows);
    Divided::embedding_layer_norm(a, like);
  }

  static int64_t layer_norm_partials(const LayerNormBackward& a, const Tensor&) {
    if (a.rows == 0 || a.cols == 0) return 1;
    const int64_t grain = pieces_per_thread(a.cols);
    const int64_t wanted = (a.rows + grain - 1) / grain;
    const int64_t threads = torch::stable::get_num_threads();
    return wanted < threads ? wanted : threads;
  }

  static void layer_norm_backward(const LayerNormBackward& a, void* grad_weight, void* grad_bias, const Tensor&) {
    const CpuKernels& kernels = cpu_kernels();
    const bool is_double = a.dtype == DType::f64;
    const size_t bytes = static_cast<size_t>(a.partials * a.cols) * (is_double ? sizeof(double) : sizeof(float));
    for (void* partial : {a.partial_weight, a.partial_bias}) {
      if (partial != nullptr) std::memset(partial, 0, bytes);
    }
    // Each share of the rows has its own sums: no locks, and the same result at every call with as many
    // threads.
    const int64_t share = (a.rows + a.partials - 1) / a.partials;
    torch::stable::parallel_for(0, a.partials, 1, [&](int64_t begin, int64_t end) {
      for (int64_t p = begin; p < end; ++p) {
        const int64_t stop = (p + 1) * share < a.rows ? (p + 1) * share : a.rows;
        if (a.cols > 0 && p * share < stop) kernels.layer_norm_backward(a, p * share, stop, p);
      }
    });
    const DType wide = is_double ? DType::f64 : DType::f32;
    sum_partials({grad_weight, a.partial_weight, a.partials, a.cols, wide, a.affine_dtype});
    sum_partials({grad_bias, a.partial_bias, a.partials, a.cols, wide, a.affine_dtype});
  }

  static void linear(const Tensor& y, const Tensor& x, const Tensor& weight_t, const OptionalTensor& bias) {
    if (bias) {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_addmm_out(y.get(), bias->get(), x.get(), weight_t.get(), 1.0, 1.0));
    } else {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(y.get(), x.get(), weight_t.get()));
    }
  }

  static Tensor convolution(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, const Convolution& c) {
    AtenTensorHandle bias_handle = bias ? bias->get() : nullptr;
    AtenTensorHandle y;
    const int64_t n = static_cast<int64_t>(c.stride.size());
    const std::vector<int64_t> output_padding(c.stride.size(), 0);
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution(x.get(), weight.get(), bias ? &bias_handle : nullptr,
                                                             c.stride.data(), n, c.padding.data(), n, c.dilation.data(),
                                                             n, 0, output_padding.data(), n, c.groups, &y));
    return Tensor(y);
  }

  // ATen's fused forms on the CPU need packed weights, which a module can keep and a function cannot.
  static OptionalTensor linear_relu(const Tensor&, const Tensor&, const Tensor&) { return std::nullopt; }
  static OptionalTensor conv_relu(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                  const Convolution&) {
    return std::nullopt;
  }
};

}  // namespace
}  // namespace kfc

STABLE_TORCH_LIBRARY_IMPL(kfconvert, CPU, m) { kfc::register_operators<kfc::Cpu>(m); }
