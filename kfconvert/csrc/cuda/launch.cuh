// Launches that overlap with the end of the kernel before them: on Hopper and later a kernel may be put onto the device
// while the one ahead of it in the stream still runs (programmatic dependent launch), which hides what a launch costs
// between small kernels, also in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

namespace kfc {

// The first thing in every kernel that launch_overlapped launches, for all its threads: nothing before it may read or
// write global memory. It returns when the kernels ahead have ended and their writes are visible; from then on the next
// kernel may be put onto the device.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

inline bool overlaps_launches() {
  int device = 0;
  int major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  return major >= 9;
}

// Errors are left to cudaGetLastError, as after <<<>>>.
template <class... Parameters, class... Arguments>
void launch_overlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream,
                       const Arguments&... arguments) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps_launches() ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace kfc
