// Chooses the widest instruction set that this machine and its operating system offer.
// KFCONVERT_CPU_CAPABILITY (generic, avx2 or avx512) asks for a narrower one, so that every version can be
// tested on one machine.
#include <cstdlib>
#include <cstring>

#include "kernels.h"

namespace kfc {

template <class Function>
using Identity = Function;

#define KFC_CAPABILITY generic
#include "capability.h"
#ifdef KFC_X86
#define KFC_CAPABILITY avx2
#include "capability.h"
#define KFC_CAPABILITY avx512
#include "capability.h"
#endif

namespace {

CpuKernels choose() {
#ifdef KFC_X86
  const char* asked = std::getenv("KFCONVERT_CPU_CAPABILITY");
  const bool at_most_generic = asked != nullptr && std::strcmp(asked, "generic") == 0;
  const bool at_most_avx2 = asked != nullptr && std::strcmp(asked, "avx2") == 0;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (avx2 && avx512 && !at_most_generic && !at_most_avx2) return kernels_avx512();
  if (avx2 && !at_most_generic) return kernels_avx2();
#endif
  return kernels_generic();
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
