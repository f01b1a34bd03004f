// s = word[ids] + position[n] + token_type[token_type_ids]; y = (s - mean) * rstd * weight + bias. s is a row that
// stays in the cache; limited by memory bandwidth. Built once for each instruction set (KFC_CAPABILITY).
#include "kernels.h"
#include "norm_rows.h"
#include "scratch.h"

namespace {

// Row `id` of a table in the accumulation type.
template <class T, class A>
const A* row_of(const void* table, int64_t id, int64_t cols, A* scratch) {
  return as_accumulator(static_cast<const T*>(table) + id * cols, scratch, cols);
}

template <class T>
void embedding_layer_norm_range(const kfc::EmbeddingLayerNorm& a, int64_t begin, int64_t end) {
  using A = typename Accumulate<T>::type;
  const int64_t cols = a.norm.cols;
  const Scratch<A> scratch(4, cols);
  A* s = scratch.row(0);
  const A* weight = load_weight<T>(a.norm, scratch.row(2));
  const A* bias = load_affine<T>(a.norm.bias, a.norm, scratch.row(3));
  for (int64_t r = begin; r < end; ++r) {
    const A* word = row_of<T>(a.word, kfc::id_at(a.ids, r), cols, s);
    add_rows(word, row_of<T>(a.token_type, kfc::id_at(a.token_type_ids, r), cols, scratch.row(1)), s, cols);
    add_rows(static_cast<const A*>(s), row_of<T>(a.position, r % a.positions, cols, scratch.row(1)), s, cols);
    const T* next = r + 1 < end ? static_cast<const T*>(a.word) + kfc::id_at(a.ids, r + 1) * cols : nullptr;
    write_row(a.norm, r, static_cast<const A*>(s), weight, bias, next);
  }
}

}  // namespace

namespace kfc {

void KFC_FOR_CAPABILITY(embedding_layer_norm)(const EmbeddingLayerNorm& a, int64_t begin, int64_t end) {
  KFC_DISPATCH_DTYPE(a.norm.dtype, embedding_layer_norm_range<T>(a, begin, end));
}

}  // namespace kfc
