// Products of 1 to 16 rows with a weight whose rows are contiguous, see skinny_product.cu: the weight passes through
// shared memory, in which each lane has a queue of the words that it will need
//
// A lane issues the copy of a word as soon as it has used another, so the queues are in flight at any time. Registers
// would be empty before they are loaded again. If no kernel ahead writes to the weight, the queues fill while the
// kernels ahead still run. Each block normalizes x itself: a separate kernel would take longer than its arithmetic.
#include "skinny_product.cuh"

namespace kfc {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBlocks = 2;    // on a multiprocessor
constexpr int kPadding = 32;  // elements between rows of x, so that two rows lie in different banks

// Copies a word from global to shared memory, or zeros without reading; see close_group and wait_for_groups.
__device__ __forceinline__ void copy_word(uint32_t to, const void* from, bool is_inside) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)),
               "r"(is_inside ? kPackBytes : 0)
               : "memory");
#endif
}

__device__ __forceinline__ uint32_t shared_address(const void* of) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(of));
}

__device__ __forceinline__ uint4 load_shared(uint32_t from) {
  uint4 word;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "r"(from)
               : "memory");
  return word;
}

// The copies of a lane since the last group are a group.
__device__ __forceinline__ void close_group() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of the lane but the last `left`.
template <int left>
__device__ __forceinline__ void wait_for_groups() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_group %0;" ::"n"(left) : "memory");
#endif
}

// Eight elements into shared memory, for which `store` has another instruction.
template <class T>
__device__ __forceinline__ void store_shared(T* to, const float (&from)[8]) {
  Pack<T, 8> pack;
#pragma unroll
  for (int i = 0; i < 8; ++i) pack.v[i] = narrow<T>(from[i]);
  *reinterpret_cast<uint4*>(to) = word_of(pack);
}

// What the rows of x take in shared memory: nothing where there are many.
__host__ __device__ __forceinline__ int64_t bytes_of_x(const SkinnyProduct& a) {
  return 2 * a.rows * a.in <= kMostHeld ? 2 * a.rows * (a.in + kPadding) : 0;
}

__host__ __device__ __forceinline__ int64_t bytes_of_norm(const SkinnyProduct& a) {
  return 2 * a.in * ((a.norm != nullptr ? 1 : 0) + (a.norm_bias != nullptr ? 1 : 0));
}

// Writes the rows of x to `copied`, one after the other.
template <class T>
__device__ __forceinline__ void copy_rows(const SkinnyProduct& a, T* copied) {
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    for (int64_t at = threadIdx.x * 8; at < a.in; at += kThreads * 8) {
      *reinterpret_cast<uint4*>(copied + row * (a.in + kPadding) + at) = load_word<Pack<T, 8>>(x + at);
    }
  }
}

// Returns the sum of the warps' sums of `row`.
__device__ __forceinline__ float total_of(const float (&of_warps)[kWarps][2 * kRows], int64_t row) {
  float total = 0;
#pragma unroll
  for (int k = 0; k < kWarps; ++k) total += of_warps[k][row];
  return total;
}

// Writes the normalized rows of x to `normed`, one after the other. s is rounded, as a model rounds it that adds first.
// `weight`, `bias`: of the norm, of which each thread has copied what it reads here; bias may be null.
template <class T>
__device__ __forceinline__ void normalize_rows(const SkinnyProduct& a, T* normed, const T* weight, const T* bias) {
  constexpr int kEach = 8;
  __shared__ float sums[kWarps][2 * kRows];
  __shared__ float squares[kWarps][2 * kRows];
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const float in = static_cast<float>(a.in);
  for (int64_t row = 0; row < a.rows; ++row) {
    const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
    const T* residual = static_cast<const T*>(a.residual) + row * a.in;
    float total[1] = {0};
    for (int64_t at = threadIdx.x * kEach; at < a.in; at += kThreads * kEach) {
      float values[kEach];
      load<kEach>(x + at, values);
      if (a.residual != nullptr) {
        float added[kEach];
        load<kEach>(residual + at, added);
#pragma unroll
        for (int i = 0; i < kEach; ++i) values[i] = widen(narrow<T>(values[i] + added[i]));
        if (blockIdx.x == 0) store<kEach>(static_cast<T*>(a.sum) + row * a.in + at, values);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) total[0] += a.centers ? values[i] : values[i] * values[i];
      store_shared(normed + row * (a.in + kPadding) + at, values);
    }
    lane_sums<32>(total);
    if (lane == 0) (a.centers ? sums : squares)[warp][row] = total[0];
  }
  __syncthreads();
  if (a.centers) {
    for (int64_t row = 0; row < a.rows; ++row) {
      const float mean = total_of(sums, row) / in;
      float square[1] = {0};
      for (int64_t at = threadIdx.x * kEach; at < a.in; at += kThreads * kEach) {
        float values[kEach];
        load<kEach>(normed + row * (a.in + kPadding) + at, values);
#pragma unroll
        for (int i = 0; i < kEach; ++i) square[0] += (values[i] - mean) * (values[i] - mean);
      }
      lane_sums<32>(square);
      if (lane == 0) squares[warp][row] = square[0];
    }
    __syncthreads();
  }
  const float offset = static_cast<float>(a.offset);
  for (int64_t row = 0; row < a.rows; ++row) {
    const float mean = a.centers ? total_of(sums, row) / in : 0.0f;
    const float factor = rsqrtf(total_of(squares, row) / in + static_cast<float>(a.eps));
    for (int64_t at = threadIdx.x * kEach; at < a.in; at += kThreads * kEach) {
      float values[kEach];
      float factors[kEach];
      float shifts[kEach] = {};
      load<kEach>(normed + row * (a.in + kPadding) + at, values);
      load<kEach>(weight + at, factors);
      if (bias != nullptr) load<kEach>(bias + at, shifts);
#pragma unroll
      for (int i = 0; i < kEach; ++i) values[i] = (values[i] - mean) * factor * (offset + factors[i]) + shifts[i];
      store_shared(normed + row * (a.in + kPadding) + at, values);
    }
  }
  __syncthreads();
}

// W: the elements of the weight. TILES: of eight rows of x. HEIGHT: rows of a tile of the weight, 8 or, for a gate, 16.
// DEPTH: parts of a queue, each of four words.
template <class T, class W, int TILES, int HEIGHT, int DEPTH>
__global__ void __launch_bounds__(kThreads) skinny_rows_kernel(const __grid_constant__ SkinnyProduct a) {
  constexpr int kEach = kPackBytes / sizeof(W);       // elements of a word of the weight
  constexpr int kParts = sizeof(T) / sizeof(W);       // words of x that go with it
  constexpr int kHalves = HEIGHT / kRows;             // of a tile
  constexpr int kSteps = 4 / kHalves;                 // words of a row
  constexpr int kSpan = kWarps * kSteps * 4 * kEach;  // inputs of a part
  extern __shared__ uint4 memory[];
  __shared__ float sums[2][kWarps][TILES * kRows][HEIGHT + 1];    // of this tile and the last
  T* held = reinterpret_cast<T*>(memory + DEPTH * 4 * kThreads);  // rows of x
  T* norm = held + a.rows * (a.in + kPadding);
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int group = lane / 4;
  const int outputs = a.gated ? HEIGHT / 2 : HEIGHT;
  const int tiles = static_cast<int>((a.out + outputs - 1) / outputs);
  const int in = static_cast<int>(a.in);
  // A quarter of a warp takes a line of each row, in as many words.
  const int column = (warp * kSteps * 4 + lane % 4) * kEach;

  // The parts of the queue of this lane.
  constexpr uint32_t kPartBytes = 4 * kThreads * kPackBytes;
  const uint32_t queue = shared_address(memory + threadIdx.x);
  const auto after = [&](uint32_t part) {
    return part == queue + (DEPTH - 1) * kPartBytes ? queue : part + kPartBytes;
  };
  int issued_tile = blockIdx.x;
  int issued = 0;  // the first input of the part to issue next
  const W* from[kHalves] = {};
  const auto issue = [&](uint32_t part) {
    if (issued_tile < tiles) {
      if (issued == 0) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          // Rows beyond the last are the last, and what they give is not written.
          const int64_t output = issued_tile * outputs + (a.gated ? group : group + half * kRows);
          const int64_t row = (output < a.out ? output : a.out - 1) + (a.gated && half == 1 ? a.out : 0);
          from[half] = weight_row<T, W>(a, row) + column;
        }
      }
      const int left = in - issued - column;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          copy_word(part + (step * kHalves + half) * kThreads * kPackBytes, from[half] + step * 4 * kEach,
                    left > step * 4 * kEach);
        }
      }
      issued += kSpan;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) from[half] += kSpan;
      if (issued >= in) {
        issued = 0;
        issued_tile += gridDim.x;
      }
    }
    close_group();
  };
  const auto fill = [&] {
    if (a.norm != nullptr) {
      for (int at = threadIdx.x * 8; at < in; at += kThreads * 8) {
        copy_word(shared_address(norm + at), static_cast<const T*>(a.norm) + at, true);
        if (a.norm_bias != nullptr) {
          copy_word(shared_address(norm + in + at), static_cast<const T*>(a.norm_bias) + at, true);
        }
      }
    }
#pragma unroll
    for (int part = 0; part < DEPTH - 1; ++part) issue(queue + part * kPartBytes);
  };
  if (a.early) fill();
  wait_for_previous_kernel();
  if (!a.early) fill();
  const bool holds = bytes_of_x(a) > 0;
  if (a.norm != nullptr) {
    wait_for_groups<DEPTH - 2>();
    normalize_rows<T>(a, held, norm, a.norm_bias != nullptr ? norm + in : nullptr);
  } else if (holds) {
    copy_rows<T>(a, held);
    __syncthreads();
  }
  const T* rows[TILES];
  uint32_t held_rows[TILES];
#pragma unroll
  for (int i = 0; i < TILES; ++i) {
    const int64_t row = i * kRows + group < a.rows ? i * kRows + group : a.rows - 1;
    rows[i] = static_cast<const T*>(a.x) + row * a.x_stride + column;
    held_rows[i] = shared_address(held + row * (a.in + kPadding) + column);
  }
  uint32_t part = queue;
  uint32_t spare = queue + (DEPTH - 1) * kPartBytes;
  int turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++turn) {
    // The warps take turns in finishing a tile.
    const int finisher = (threadIdx.x + 32 * turn) % kThreads;
    const int64_t output = static_cast<int64_t>(tile) * outputs + finisher % HEIGHT;
    const bool is_output = finisher % HEIGHT < outputs && output < a.out && finisher / HEIGHT < a.rows;
    const Terms<T> terms = is_output ? terms_of<T>(a, output) : Terms<T>{};
    float c[TILES][4] = {};
    for (int begin = 0; begin < in; begin += kSpan) {
      uint4 x[kSteps][TILES][kParts];
      const auto load_x = [&](auto load) {
        const int left = in - begin - column;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
#pragma unroll
            for (int p = 0; p < kParts; ++p) {
              const int at = step * 4 * kEach + 8 * p;
              const bool is_inside = begin + kSpan <= in || left > at;
              x[step][i][p] = is_inside ? load(i, begin + at) : make_uint4(0, 0, 0, 0);
            }
          }
        }
      };
      if (holds) {
        load_x([&](int i, int at) { return load_shared(held_rows[i] + at * static_cast<int>(sizeof(T))); });
      } else {
        load_x([&](int i, int at) { return load_word<Pack<T, 8>>(rows[i] + at); });
      }
      wait_for_groups<DEPTH - 2>();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t words = part + step * kHalves * kThreads * kPackBytes;
        const uint4 upper = load_shared(words);
        const uint4 lower = kHalves > 1 ? load_shared(words + kThreads * kPackBytes) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int p = 0; p < kParts; ++p) {
          const uint4 u = halves_in<T, W>(upper, p);
          const uint4 v = kHalves > 1 ? halves_in<T, W>(lower, p) : lower;
#pragma unroll
          for (int i = 0; i < TILES; ++i) {
            multiply_add<T>(c[i], u.x, v.x, u.y, v.y, x[step][i][p].x, x[step][i][p].y);
            multiply_add<T>(c[i], u.z, v.z, u.w, v.w, x[step][i][p].z, x[step][i][p].w);
          }
        }
      }
      // The words of the part before this one have been used.
      issue(spare);
      spare = part;
      part = after(part);
    }
    auto& sum = sums[turn % 2];
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
#pragma unroll
      for (int k = 0; k < 2 * kHalves; ++k) sum[warp][i * kRows + lane % 4 * 2 + k % 2][group + k / 2 * 8] = c[i][k];
    }
    __syncthreads();
    if (is_output) {
      for (int64_t row = finisher / HEIGHT; row < a.rows; row += kThreads / HEIGHT) {
        float value = 0;
        float other = 0;
#pragma unroll
        for (int k = 0; k < kWarps; ++k) {
          value += sum[k][row][finisher % HEIGHT];
          if (a.gated) other += sum[k][row][finisher % HEIGHT + outputs];
        }
        finish<T>(a, row, output, terms, value, other);
      }
    }
  }
}

template <class T, class W, int TILES, int HEIGHT, int DEPTH>
void launch_depth(const SkinnyProduct& a, cudaStream_t stream) {
  const int64_t tiles = blocks_of(a.out, a.gated ? HEIGHT / 2 : HEIGHT);
  const int64_t most = kBlocks * multiprocessors();
  const int64_t bytes = DEPTH * 4 * kThreads * kPackBytes + bytes_of_x(a) + bytes_of_norm(a);
  launch_with_memory(skinny_rows_kernel<T, W, TILES, HEIGHT, DEPTH>, static_cast<unsigned>(tiles < most ? tiles : most),
                     kThreads, static_cast<int>(bytes), stream, a);
}

template <class T, class W, int TILES, int HEIGHT>
void launch_height(const SkinnyProduct& a, cudaStream_t stream) {
  constexpr int kEnough = 128 << 10;  // bytes of shared memory
  if (device_attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>() < kEnough) {
    return launch_depth<T, W, TILES, HEIGHT, 2>(a, stream);
  }
  launch_depth<T, W, TILES, HEIGHT, 4>(a, stream);
}

// The share of the blocks that have work on average, with tiles of so many outputs.
double share_at_work(int64_t out, int64_t outputs) {
  const int64_t blocks = kBlocks * multiprocessors();
  const int64_t tiles = blocks_of(out, outputs);
  return static_cast<double>(tiles) / static_cast<double>(blocks_of(tiles, blocks) * blocks);
}

template <class T, class W, int TILES>
void launch_tiles(const SkinnyProduct& a, cudaStream_t stream) {
  const bool low = !a.gated && share_at_work(a.out, kRows) > share_at_work(a.out, 2 * kRows);
  low ? launch_height<T, W, TILES, kRows>(a, stream) : launch_height<T, W, TILES, 2 * kRows>(a, stream);
}

template <class T, class W>
void launch_numbers(const SkinnyProduct& a, cudaStream_t stream) {
  a.rows <= kRows ? launch_tiles<T, W, 1>(a, stream) : launch_tiles<T, W, 2>(a, stream);
}

template <class T>
void launch(const SkinnyProduct& a, cudaStream_t stream) {
  if (a.numbers == Numbers::int8) return launch_numbers<T, int8_t>(a, stream);
  if (a.numbers == Numbers::float8) return launch_numbers<T, Float8>(a, stream);
  launch_numbers<T, T>(a, stream);
}

}  // namespace

void launch_skinny_rows(const SkinnyProduct& a, cudaStream_t stream) {
  KFC_DISPATCH_HALF(a.dtype, launch<T>(a, stream));
}

}  // namespace kfc
