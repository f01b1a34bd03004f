// Host side of next_token, for a backend that has it.
#pragma once

#include "host.h"

namespace kfc {

// t: so many integers, or booleans, together in memory.
inline void check_counts(const char* op, const char* name, const Tensor& like, const Tensor& t, int32_t dtype,
                         int64_t numel) {
  const Options options = options_of(t);
  check_same_device(op, name, options_of(like), options);
  KFC_CHECK(options.dtype == dtype && t.numel() == numel && t.is_contiguous(), op, name, " has shape ", shape_text(t),
            ", another dtype or gaps, expected ", numel, " numbers");
}

// Puts the token with the largest score of each row where the next step takes it up.
template <class Backend>
void next_token_(const Tensor& scores, const OptionalTensor& held_back, const Tensor& least, const OptionalTensor& ends,
                 int64_t pad, const Tensor& sequences, const Tensor& length, const Tensor& finished,
                 const Tensor& inputs, const Tensor& position, const OptionalTensor& position_ids,
                 const Tensor& scratch) {
  const char* op = "next_token_";
  NextToken a{};
  a.dtype = dtype_of(op, options_of(scores));
  KFC_CHECK(scores.dim() == 2 && scores.numel() > 0 && (scores.size(1) == 1 || scores.stride(1) == 1), op,
            "scores have shape ", shape_text(scores), ", or words that do not lie together");
  a.rows = scores.size(0);
  a.words = scores.size(1);
  a.score_stride = scores.stride(0);
  const int32_t whole = aoti_torch_dtype_int64();
  const int32_t boolean = aoti_torch_dtype_bool();
  if (held_back) check_counts(op, "held_back", scores, *held_back, boolean, a.words);
  if (ends) check_counts(op, "ends", scores, *ends, whole, ends->numel());
  if (position_ids) check_counts(op, "position_ids", scores, *position_ids, whole, a.rows);
  KFC_CHECK(sequences.dim() == 2, op, "sequences must have rows");
  a.width = sequences.size(1);
  check_counts(op, "sequences", scores, sequences, whole, a.rows * a.width);
  check_counts(op, "least", scores, least, whole, 1);
  check_counts(op, "length", scores, length, whole, 1);
  check_counts(op, "finished", scores, finished, boolean, a.rows);
  check_counts(op, "inputs", scores, inputs, whole, a.rows);
  check_counts(op, "position", scores, position, whole, 1);
  a.parts = (scratch.numel() - 1) / (2 * a.rows);
  KFC_CHECK(a.parts > 0, op, "scratch has ", scratch.numel(), " numbers, expected ", 2 * a.rows + 1, " or more");
  check_counts(op, "scratch", scores, scratch, whole, 2 * a.rows * a.parts + 1);
  const auto counts = [](const Tensor& t) { return static_cast<int64_t*>(t.mutable_data_ptr()); };
  a.scores = scores.const_data_ptr();
  a.held_back = held_back ? static_cast<const bool*>(held_back->const_data_ptr()) : nullptr;
  a.least = static_cast<const int64_t*>(least.const_data_ptr());
  a.ends = ends ? static_cast<const int64_t*>(ends->const_data_ptr()) : nullptr;
  a.end_count = ends ? ends->numel() : 0;
  a.pad = pad;
  a.sequences = counts(sequences);
  a.length = counts(length);
  a.finished = static_cast<bool*>(finished.mutable_data_ptr());
  a.inputs = counts(inputs);
  a.position = counts(position);
  a.position_ids = position_ids ? counts(*position_ids) : nullptr;
  a.scratch = counts(scratch);
  Backend::next_token(a, scores);
}

}  // namespace kfc
