// Declares the kernels that were built for the instruction set KFC_CAPABILITY, and makes a table of them. Included once
// for each set, so without a guard.
#define KFC_DECLARE(name, ...)                     Identity<__VA_ARGS__> KFC_FOR_CAPABILITY(name);
#define KFC_DECLARE_OF_RANGE(name, Arguments, ...) KFC_DECLARE(name, RangeKernel<Arguments>)
#define KFC_DECLARE_SUMMING(name, Arguments, ...)  KFC_DECLARE(name, SummingKernel<Arguments>)
#define KFC_SET(kernel, ...)                       kernels.kernel = KFC_FOR_CAPABILITY(kernel);
#define KFC_SET_OF_RANGE                           KFC_SET
#define KFC_SET_SUMMING                            KFC_SET
#define KFC_TEXT_(capability)                      #capability
#define KFC_TEXT(capability)                       KFC_TEXT_(capability)

KFC_CPU_KERNELS(KFC_DECLARE)

static CpuKernels KFC_FOR_CAPABILITY(kernels)() {
  CpuKernels kernels;
  kernels.name = KFC_TEXT(KFC_CAPABILITY);
  KFC_CPU_KERNELS(KFC_SET)
  return kernels;
}

#undef KFC_DECLARE
#undef KFC_DECLARE_OF_RANGE
#undef KFC_DECLARE_SUMMING
#undef KFC_SET
#undef KFC_SET_OF_RANGE
#undef KFC_SET_SUMMING
#undef KFC_TEXT_
#undef KFC_TEXT
#undef KFC_CAPABILITY
