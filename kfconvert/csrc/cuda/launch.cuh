// Launches that overlap with the end of the kernel before them: on Hopper and later a kernel may be put onto the device
// while the one ahead of it in the stream still runs (programmatic dependent launch), which hides what a launch costs
// between small kernels, also in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace kfc {

// The first thing in every kernel that launch_overlapped launches, for all its threads: before it nothing may be read
// or written that a kernel ahead writes or reads. It lets the next kernel onto the device as soon as all blocks of this
// one are there, and returns when the kernels ahead have ended and their writes are visible. The next one waits for the
// end of this one, which comes after the end of those ahead, so that no kernel overtakes another.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

// Before wait_for_previous_kernel, for kernels that do something before they wait.
__device__ __forceinline__ void start_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Requests a line of memory for the second-level cache. This reads nothing, so that kernels ahead may still write to
// it.
__device__ __forceinline__ void prefetch(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(line)));
}

// An attribute of the current device, which every launch asks for: remembered for the first devices of a machine.
template <cudaDeviceAttr attribute>
int device_attribute() {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];  // the value + 1
  int device = 0;
  cudaGetDevice(&device);
  int value = device < kDevices ? known[device].load(std::memory_order_relaxed) - 1 : -1;
  if (value < 0 && cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess && device < kDevices)
    known[device].store(value + 1, std::memory_order_relaxed);
  return value;
}

inline bool overlaps_launches() { return device_attribute<cudaDevAttrComputeCapabilityMajor>() >= 9; }

// How many blocks of `each` hold `count`.
inline int64_t blocks_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

// Errors are left to cudaGetLastError, as after <<<>>>. bytes: of dynamic shared memory.
template <class... Parameters, class... Arguments>
void launch_with_memory(void (*kernel)(Parameters...), dim3 grid, dim3 block, int bytes, cudaStream_t stream,
                        const Arguments&... arguments) {
  constexpr int kWithoutAsking = 32 << 10;  // of 48 KiB, which include memory that is not dynamic
  if (bytes > kWithoutAsking) cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps_launches() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

template <class... Parameters, class... Arguments>
void launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                       const Arguments&... arguments) {
  launch_with_memory(kernel, grid, block, 0, stream, arguments...);
}

}  // namespace kfc
