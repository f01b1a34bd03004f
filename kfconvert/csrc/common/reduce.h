// Host side of reduce_rows, for any backend: sums or means over rows of squares, magnitudes or squared
// differences, and their gradients.
#pragma once

#include "host.h"

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

// What is reduced, contiguous: rows are the last `dims` dimensions of x, `kept` the sizes of the others.
struct ReducedRows {
  Tensor x;
  OptionalTensor other;
  std::vector<int64_t> kept;
  int64_t rows = 1;
  int64_t cols = 1;

  double factor(bool mean) const {  // of no elements: 1 / 0, and a mean of 0 * inf, which is a NaN
    return mean ? 1.0 / static_cast<double>(cols) : 1.0;
  }
};

inline ReducedRows reduced_rows(const char* op, const Tensor& x, const OptionalTensor& other, int64_t dims, Term term) {
  KFC_CHECK(dims >= 0 && dims <= x.dim(), op, "cannot reduce ", dims, " dimensions of x of shape ", shape_text(x));
  KFC_CHECK(other.has_value() == (term == Term::squared_difference), op, "other belongs to differences only");
  ReducedRows r{as_contiguous(x), std::nullopt, {}};
  if (other) {
    check_same_options(op, "other", options_of(x), *other);
    check_same_shape(op, "other", x, *other);
    r.other = as_contiguous(*other);
  }
  for (int64_t i = 0; i < x.dim(); ++i) {
    const bool reduced = i >= x.dim() - dims;
    (reduced ? r.cols : r.rows) *= x.size(i);
    if (!reduced) r.kept.push_back(x.size(i));
  }
  return r;
}

// Over the last `dims` dimensions of x; with `wide` the result stays in the accumulation type.
template <class Backend>
Tensor reduce_rows(const Tensor& x, const OptionalTensor& other, int64_t dims, int64_t term, bool mean, bool wide) {
  const char* op = "reduce_rows";
  const Options options = options_of(x);
  Reduce a{};
  a.dtype = dtype_of(op, options);
  a.term = static_cast<Term>(term);
  const ReducedRows r = reduced_rows(op, x, other, dims, a.term);
  const Options result = wide ? accumulator(options, a.dtype) : options;
  Tensor y = empty(result, r.kept);
  a.y = y.mutable_data_ptr();
  a.x = r.x.const_data_ptr();
  a.other = data_or_null(r.other);
  a.rows = r.rows;
  a.cols = r.cols;
  a.factor = r.factor(mean);
  a.out = dtype_of(op, result);
  if (a.rows > 0) reduce_in_parts<Backend>(a, r.x);
  return y;
}

// Whether all elements of t are the same one in memory, as where the gradient of a sum was repeated.
inline bool is_one_repeated(const Tensor& t) {
  for (int64_t i = 0; i < t.dim(); ++i) {
    if (t.size(i) > 1 && t.stride(i) != 0) return false;
  }
  return true;
}

// The gradients of x and, with `both`, of other, else an empty tensor. grad: that of the result, in its shape, in the
// dtype of x or its accumulation type.
template <class Backend>
std::tuple<Tensor, Tensor> reduce_rows_backward(const Tensor& grad_in, const Tensor& x, const OptionalTensor& other,
                                                int64_t dims, int64_t term, bool mean, bool both) {
  const char* op = "reduce_rows_backward";
  const Options options = options_of(x);
  ReduceBackward a{};
  a.dtype = dtype_of(op, options);
  a.term = static_cast<Term>(term);
  const ReducedRows r = reduced_rows(op, x, other, dims, a.term);
  KFC_CHECK(other || !both, op, "there is no other to have a gradient");
  const Options of_grad = options_of(grad_in);
  check_same_device(op, "grad", options, of_grad);
  const bool fits = of_grad.dtype == options.dtype || of_grad.dtype == accumulator(options, a.dtype).dtype;
  KFC_CHECK(fits, op, "grad has neither the dtype of x nor its accumulation type");
  KFC_CHECK(sizes_of(grad_in) == r.kept, op, "grad has shape ", shape_text(grad_in), ", expected ", shape_text(r.kept));
  const std::vector<int64_t> sizes = sizes_of(x);
  Tensor grad_x = empty(options, sizes);
  Tensor grad_other = empty(options, both ? sizes : std::vector<int64_t>{0});
  const bool repeated = is_one_repeated(grad_in);
  const Tensor grad = repeated ? grad_in : as_contiguous(grad_in);
  a.grad_x = grad_x.mutable_data_ptr();
  a.grad_other = both ? grad_other.mutable_data_ptr() : nullptr;
  a.x = r.x.const_data_ptr();
  a.other = data_or_null(r.other);
  a.grad = grad.const_data_ptr();
  a.rows = repeated ? 1 : r.rows;  // rows with one gradient are one row
  a.cols = repeated ? r.x.numel() : r.cols;
  a.factor = r.factor(mean);
  a.grad_dtype = dtype_of(op, of_grad);
  if (r.x.numel() > 0) Backend::reduce_backward(a, r.x);
  return {std::move(grad_x), std::move(grad_other)};
}

}  // namespace kfc
