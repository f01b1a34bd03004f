// Clusters: blocks of one grid that run at the same time and write into each other's shared memory. Devices have them
// from Hopper on.
#pragma once

#include "launch.cuh"

namespace kfc {

// Of a cluster that every device with clusters takes
constexpr int kMostClusterBlocks = 8;

// How many blocks a cluster may have on the current device; 1: it has none. kernel: one of those to launch, as the
// device may run code that was compiled for an earlier one.
template <class Kernel>
int most_cluster_blocks(Kernel* kernel) {
  constexpr int kDevices = 64;
  static std::atomic<int> known[kDevices];
  if (!overlaps_launches()) return 1;
  int device = 0;
  cudaGetDevice(&device);
  int blocks = device < kDevices ? known[device].load(std::memory_order_relaxed) : 0;
  if (blocks > 0) return blocks;
  cudaFuncAttributes attributes{};
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return 1;
  blocks = attributes.ptxVersion >= 90 ? kMostClusterBlocks : 1;
  if (device < kDevices) known[device].store(blocks, std::memory_order_relaxed);
  return blocks;
}

// As launch_overlapped, in clusters of so many blocks, which divide the grid.
template <class... Parameters, class... Arguments>
void launch_clusters(void (*kernel)(Parameters...), dim3 grid, dim3 block, unsigned cluster, cudaStream_t stream,
                     const Arguments&... arguments) {
  if (cluster == 1) return launch_overlapped(kernel, grid, block, stream, arguments...);
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

// All threads of a cluster call these two functions in turn: between them a block may do what concerns no other one.
// After the second one all blocks have started, and see what others wrote before the first one, if `writes`.
template <bool writes>
__device__ __forceinline__ void arrive_at_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (writes) {
    __cluster_barrier_arrive();
  } else {
    __cluster_barrier_arrive_relaxed();
  }
#endif
}

__device__ __forceinline__ void wait_for_blocks() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __cluster_barrier_wait();
#endif
}

// The shared variable `own` of another block of the cluster, which must have started and may not have ended.
template <class V>
__device__ __forceinline__ V& of_block(V& own, unsigned block) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return *static_cast<V*>(__cluster_map_shared_rank(&own, block));
#else
  return own;
#endif
}

}  // namespace kfc
