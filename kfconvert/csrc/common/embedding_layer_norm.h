// Host side of embedding_layer_norm, for any backend.
#pragma once

#include "layer_norm.h"

namespace kfc {

inline RowIds row_ids(const char* op, const char* name, const Tensor& table, const Tensor& ids) {
  const Options options = options_of(ids);
  check_same_device(op, name, options_of(table), options);
  const bool narrow = options.dtype == aoti_torch_dtype_int32();
  KFC_CHECK(narrow || options.dtype == aoti_torch_dtype_int64(), op, name, " must be int32 or int64");
  KFC_CHECK(ids.dim() >= 1, op, name, " has no dimension");
  return {ids.const_data_ptr(), narrow, table.size(0)};
}

// A table (rows or more, cols) of word's dtype.
inline Tensor rows_of_table(const char* op, const char* name, const Tensor& word, const Tensor& table, int64_t rows) {
  check_same_options(op, name, options_of(word), table);
  KFC_CHECK(table.dim() == 2 && table.size(1) == word.size(1) && table.size(0) >= rows, op, name, " has shape ",
            shape_text(table), ", expected ", rows, " or more rows of ", word.size(1));
  return as_contiguous(table);
}

template <class Backend>
Tensor embedding_layer_norm(const Tensor& ids_in, const Tensor& word_in, const Tensor& position_in,
                            const Tensor& token_type_in, const OptionalTensor& token_type_ids_in,
                            const OptionalTensor& weight_in, const OptionalTensor& bias_in, double eps) {
  const char* op = "embedding_layer_norm";
  const Options options = options_of(word_in);
  EmbeddingLayerNorm a{};
  a.norm.dtype = dtype_of(op, options);
  KFC_CHECK(word_in.dim() == 2, op, "word has shape ", shape_text(word_in), ", expected (V, D)");
  const Tensor word = as_contiguous(word_in);
  const Tensor ids = as_contiguous(ids_in);
  a.ids = row_ids(op, "ids", word, ids);
  a.positions = ids.size(ids.dim() - 1);
  const Tensor position = rows_of_table(op, "position", word, position_in, a.positions);
  const Tensor token_type = rows_of_table(op, "token_type", word, token_type_in, 1);
  OptionalTensor token_type_ids;
  if (token_type_ids_in) {
    check_same_shape(op, "token_type_ids", ids, *token_type_ids_in);
    token_type_ids = as_contiguous(*token_type_ids_in);
    a.token_type_ids = row_ids(op, "token_type_ids", token_type, *token_type_ids);
  }
  a.norm.rows = ids.numel();
  a.norm.cols = word.size(1);
  a.norm.eps = eps;
  a.norm.centred = true;
  check_affine_shape(op, "weight", weight_in, {a.norm.cols});
  check_affine_shape(op, "bias", bias_in, {a.norm.cols});
  std::optional<DType> affine_dtype;
  const OptionalTensor weight = affine(op, "weight", weight_in, options, a.norm.dtype, a.norm.cols, affine_dtype);
  const OptionalTensor bias = affine(op, "bias", bias_in, options, a.norm.dtype, a.norm.cols, affine_dtype);
  a.norm.affine_dtype = affine_dtype.value_or(a.norm.dtype);
  a.norm.weight = data_or_null(weight);
  a.norm.bias = data_or_null(bias);
  a.word = word.const_data_ptr();
  a.position = position.const_data_ptr();
  a.token_type = token_type.const_data_ptr();
  std::vector<int64_t> sizes = sizes_of(ids);
  sizes.push_back(a.norm.cols);
  Tensor y = empty(options, sizes);
  a.norm.y = y.mutable_data_ptr();
  if (y.numel() > 0) Backend::embedding_layer_norm(a, word);
  return y;
}

}  // namespace kfc
