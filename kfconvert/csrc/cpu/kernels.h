// The CPU kernels as a table of functions, built once for each instruction set and chosen when the library
// loads. Each works on a range of elements or rows, so that the caller decides on the threads.
#pragma once

#include "../common/arguments.h"
#include "../common/operator_list.h"

namespace kfc {

template <class Arguments>
using RangeKernel = void(const Arguments&, int64_t begin, int64_t end);

// Adds the sums of the elements begin to end to row `share` of sums.partials, which must start as zeros.
template <class Arguments>
using SummingKernel = void(const Arguments&, const ChannelTotals& sums, int64_t begin, int64_t end, int64_t share);

template <class Function>
using Pointer = Function*;

// Calls ENTRY(name, type) for every kernel: those of the list, and those that the CPU alone has. The ranges of
// dropout_act and its gradients begin at multiples of 4; group_norm_backward leaves out grad_weight and grad_bias,
// which are the sums of the sums; layer_norm_backward adds the rows' shares of grad_weight and grad_bias into partial
// number `partial`, which must start as zeros.
#define KFC_CPU_KERNELS(ENTRY)                                                                            \
  KFC_KERNELS(ENTRY##_OF_RANGE)                                                                           \
  KFC_SUMMING_KERNELS(ENTRY##_SUMMING)                                                                    \
  ENTRY(cross_entropy_total, void(const CrossEntropy&))                                                   \
  ENTRY(layer_norm_backward, void(const LayerNormBackward&, int64_t begin, int64_t end, int64_t partial)) \
  ENTRY(sum_partials, RangeKernel<PartialSums>)

#define KFC_MEMBER(name, ...)                     Pointer<__VA_ARGS__> name;
#define KFC_MEMBER_OF_RANGE(name, Arguments, ...) KFC_MEMBER(name, RangeKernel<Arguments>)
#define KFC_MEMBER_SUMMING(name, Arguments, ...)  KFC_MEMBER(name, SummingKernel<Arguments>)

struct CpuKernels {
  const char* name;
  KFC_CPU_KERNELS(KFC_MEMBER)
};

#undef KFC_MEMBER
#undef KFC_MEMBER_OF_RANGE
#undef KFC_MEMBER_SUMMING

const CpuKernels& cpu_kernels();

}  // namespace kfc

#define KFC_JOIN_(a, b)          a##_##b
#define KFC_JOIN(a, b)           KFC_JOIN_(a, b)
#define KFC_FOR_CAPABILITY(name) KFC_JOIN(name, KFC_CAPABILITY)
