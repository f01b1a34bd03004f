// y = x * cos + rotated(x) * sin, rotated (a, b) -> (-b, a), or transposed y = x * cos - rotated(x * sin), row by row:
// one pass over memory. Built once for each instruction set.
#include "../common/arguments.h"
#include "convert.h"
#include "kernels.h"

namespace {

// Columns first to first + n - 1 of one half and those that they are paired with, STEP apart in a row.
template <bool TRANSPOSED, int STEP, class A>
KFC_ROW void rotate(const A* x, const A* cos, const A* sin, A* y, int64_t between, int64_t n) {
#pragma omp simd
  for (int64_t i = 0; i < n; ++i) {
    const int64_t a = STEP * i;
    const int64_t b = a + between;
    const A first = x[a];
    const A second = x[b];
    y[a] = TRANSPOSED ? first * cos[a] + second * sin[b] : first * cos[a] - second * sin[a];
    y[b] = TRANSPOSED ? second * cos[b] - first * sin[a] : second * cos[b] + first * sin[b];
  }
}

template <int STEP, class A>
void rotate_as(bool transposed, const A* x, const A* cos, const A* sin, A* y, int64_t between, int64_t n) {
  if (transposed) return rotate<true, STEP>(x, cos, sin, y, between, n);
  rotate<false, STEP>(x, cos, sin, y, between, n);
}

// Elements begin to begin + n - 1 of a row, and where the pairs lie `half` apart those of the other half behind them.
template <class T, class A>
const A* load_part(const T* row, int64_t begin, int64_t n, int64_t half, bool interleaved, A* scratch) {
  if constexpr (__is_same(T, A)) {
    return row + begin;
  } else {
    load_row(row + begin, scratch, n);
    if (!interleaved) load_row(row + half + begin, scratch + n, n);
    return scratch;
  }
}

template <class T>
void rope_range(const kfc::Rope& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  alignas(64) A scratch[4][2 * kBlock];
  for (int64_t row = begin; row < end; ++row) {
    int64_t at[4] = {0, 0, 0, 0};
    int64_t rest = row;
    for (int dim = a.dims - 1; dim >= 0; --dim) {
      const int64_t here = rest % a.sizes[dim];
      rest /= a.sizes[dim];
      at[0] += here * a.x_strides[dim];
      at[1] += here * a.cos_strides[dim];
      at[2] += here * a.sin_strides[dim];
      at[3] += here * a.y_strides[dim];
    }
    const T* x = static_cast<const T*>(a.x) + at[0];
    const T* cos = static_cast<const T*>(a.cos) + at[1];
    const T* sin = static_cast<const T*>(a.sin) + at[2];
    T* y = static_cast<T*>(a.y) + at[3];
    // Of neighbours a part of the whole row, else a part of each half.
    const int64_t columns = a.interleaved ? 2 * a.half : a.half;
    for (int64_t col = 0; col < columns; col += kBlock) {
      const int64_t n = columns - col < kBlock ? columns - col : kBlock;
      const A* values[3];
      const T* rows[3] = {x, cos, sin};
      for (int k = 0; k < 3; ++k) values[k] = load_part(rows[k], col, n, a.half, a.interleaved, scratch[k]);
      A* out = result_row(y + col, scratch[3]);
      if (a.interleaved) {
        rotate_as<2>(a.transposed, values[0], values[1], values[2], out, 1, n / 2);
        store_result(out, y + col, n);
      } else {
        rotate_as<1>(a.transposed, values[0], values[1], values[2], out, __is_same(T, A) ? a.half : n, n);
        store_result(out, y + col, n);
        store_result(out + n, y + a.half + col, n);
      }
    }
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(rope)(const Rope& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.dtype, rope_range<T>(a, begin, end));
}

}  // namespace kfc
