// Host side of reduce_rows, for any backend: sums or means over rows of squares, magnitudes or squared
// differences.
#pragma once

#include "layer_norm.h"

namespace kfc {

// Long rows are cut into parts, where few rows would leave threads idle; the same kernel adds up the sums of
// the parts in a second turn. Always in the same order: no atomics.
template <class Backend>
void reduce_in_parts(Reduce& a, const Tensor& x) {
  a.part = Backend::reduce_part(a, x);
  a.parts = a.part < a.cols ? (a.cols + a.part - 1) / a.part : 1;
  if (a.parts == 1) return Backend::reduce(a, x);
  const Options options = accumulator(options_of(x), a.dtype);
  Tensor partials = empty(options, {a.rows, a.parts});
  Reduce first = a;
  first.y = partials.mutable_data_ptr();
  first.factor = 1;
  first.out = dtype_of("reduce_rows", options);
  Backend::reduce(first, x);
  Reduce second = a;
  second.x = first.y;
  second.other = nullptr;
  second.cols = second.part = a.parts;
  second.parts = 1;
  second.term = Term::identity;
  second.dtype = first.out;
  Backend::reduce(second, x);
}

// Over the last `dims` dimensions of x; with `wide` the result stays in the accumulation type.
template <class Backend>
Tensor reduce_rows(const Tensor& x_in, const OptionalTensor& other_in, int64_t dims, int64_t term, bool mean,
                   bool wide) {
  const char* op = "reduce_rows";
  const Options options = options_of(x_in);
  Reduce a{};
  a.dtype = dtype_of(op, options);
  a.term = static_cast<Term>(term);
  KFC_CHECK(dims >= 0 && dims <= x_in.dim(), op, "cannot reduce ", dims, " dimensions of x of shape ",
            shape_text(x_in));
  KFC_CHECK(other_in.has_value() == (a.term == Term::squared_difference), op,
            "other belongs to differences only");
  const Tensor x = as_contiguous(x_in);
  OptionalTensor other;
  if (other_in) {
    check_same_options(op, "other", options, *other_in);
    check_same_shape(op, "other", x, *other_in);
    other = as_contiguous(*other_in);
  }
  std::vector<int64_t> kept;
  a.rows = a.cols = 1;
  for (int64_t i = 0; i < x.dim(); ++i) {
    const bool reduced = i >= x.dim() - dims;
    (reduced ? a.cols : a.rows) *= x.size(i);
    if (!reduced) kept.push_back(x.size(i));
  }
  const Options result = wide ? accumulator(options, a.dtype) : options;
  Tensor y = empty(result, kept);
  a.y = y.mutable_data_ptr();
  a.x = x.const_data_ptr();
  a.other = data_or_null(other);
  a.factor = mean ? 1.0 / static_cast<double>(a.cols) : 1.0;  // of no elements: 0 * inf, which is a NaN
  a.out = dtype_of(op, result);
  if (a.rows > 0) reduce_in_parts<Backend>(a, x);
  return y;
}

}  // namespace kfc
