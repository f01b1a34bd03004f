// What a host function hands to a kernel: raw pointers and sizes, nothing of torch, so that kernel files
// compile in seconds and hold no inline torch code built for a wider instruction set than the machine has.
#pragma once

#include <cstdint>

namespace kfc {

enum class DType : int { f32, f64, f16, bf16 };

// y = act(x + bias + residual), or with `grad`: y = grad * act'(x + bias + residual); with `scale` x * scale
// stands for x, with `slopes` prelu for act. Every tensor lies in memory as x does (any dense layout); the channel of
// element i is (i / inner) % channels.
struct BiasAct {
  void* y;               // (numel)
  const void* x;         // (numel); may be y
  const void* bias;      // (channels) or null; with scale in the accumulation type, and not null
  const void* scale;     // (channels), accumulation type, or null
  const void* slopes;    // (channels) or null; without scale
  const void* residual;  // (numel) or null
  const void* grad;      // (numel) or null
  int64_t numel;
  int64_t channels;
  int64_t inner;
  DType dtype;
  int activation;
  double slope;
};

// y = dropout(act(x + bias)) + residual, or with `grad`: y = dropout(grad) * act'(x + bias). Element i is kept where
// word i % 4 of Philox 4x32-7 (common/philox.h) with counter (i / 4, sequence) and key `seed` is at least `dropped`,
// and then multiplied by `scale`.
struct DropoutAct {
  BiasAct terms;
  const int64_t* state;  // (seed, sequence) on the device, or null: those that follow
  uint64_t seed;
  uint64_t sequence;
  uint32_t dropped;  // p * 2^32
  double scale;      // 1 / (1 - p)
};

// What a backward pass adds up by channel as it goes: each of the `shares` shares of the elements has its own sums,
// which are then added up in a fixed order, so that the result is the same at every call.
constexpr int kMostTotals = 2;
struct ChannelTotals {
  void* totals[kMostTotals];    // (channels), or null where there are fewer
  void* partials[kMostTotals];  // (shares, channels), accumulation type; on the CPU double
  int64_t shares;
  DType dtype;  // of totals
};

// y = act(x * scale + shift) by channel with scale = weight / sqrt(variance + eps), shift = bias - mean * scale. With
// `grad`: g = grad * act'(x * scale + shift), y = g * scale, and the totals are the sums of g * (x - mean) /
// sqrt(variance + eps) and of g.
struct BatchNormAct {
  BiasAct terms;         // x, y, grad, activation and sizes
  const void* mean;      // (channels)
  const void* variance;  // (channels)
  const void* weight;    // (channels) or null: 1
  const void* bias;      // (channels) or null: 0
  double eps;
  DType dtype;  // of these four: that of x, or f32 beside a half type
};

// total[col] = the sum of partials[p][col] over p.
struct PartialSums {
  void* total;           // (cols)
  const void* partials;  // (count, cols)
  int64_t count;
  int64_t cols;
  DType dtype;  // of partials: f32 or f64
  DType out;    // of total
};

// integers = clamp(round(reals / scale + zero_point), -128, 127), or the other way reals = (integers - zero_point) *
// scale. The channel of element i is (i / inner) % channels.
struct Quantize {
  void* reals;             // (numel), read only where integers are made
  int8_t* integers;        // (numel), read only where reals are made
  const void* scale;       // (channels), accumulation type of reals, or null: scale_value
  const void* zero_point;  // (channels), accumulation type, integers with zero_point_bits; or null: zero_point_value
  int zero_point_bits;     // 0, 32 or 64
  double scale_value;
  double zero_point_value;
  int64_t numel;
  int64_t channels;
  int64_t inner;
  DType dtype;  // of reals
};

// y = (image / 255 - mean) / deviation for each channel.
constexpr int kFewChannels = 4;
struct NormalizeImage {
  void* y;                // (images, channels, height, width), or with channels_last (images, height, width, channels)
  const uint8_t* image;   // (images, height, width, channels)
  const void* mean;       // (channels), accumulation type, or null: mean_values
  const void* deviation;  // the same, or null: deviation_values
  double mean_values[kFewChannels];
  double deviation_values[kFewChannels];
  int64_t sizes[3];    // images, height, width
  int64_t strides[3];  // theirs in image
  int64_t channels;
  int64_t channel_stride;
  bool channels_last;
  DType dtype;  // of y
};

// Where the elements of a tensor lie that is broadcast to `sizes`, which are those of the result, outermost first.
constexpr int kMostDims = 5;
struct Broadcast {
  const void* data;
  int64_t strides[kMostDims];  // 0 where it is repeated
};

// The numbers are those of kfconvert/ops/fused/combine_act.py.
enum class Combination : int {
  sum = 0,      // act(x + other)
  product = 1,  // act(x * other)
  gated = 2,    // act(x) * other
};

// The combination of x and other; with `grad` its gradients, y that of x and grad_other that of other (of the sum
// they are equal, and there is no kernel for them). y, grad and grad_other are dense in the order of `sizes`.
struct CombineAct {
  void* y;           // (numel)
  void* grad_other;  // (numel), or null without grad
  const void* grad;  // (numel) or null
  Broadcast x;
  Broadcast other;
  int64_t sizes[kMostDims];
  int dims;  // at least 1
  int64_t numel;
  Combination combination;
  DType dtype;
  int activation;
  double slope;
};

// y = x * cos + rotated(x) * sin for each row of 2 half columns, where rotated turns the pairs (a, b) of a row into
// (-b, a), or with `transposed` y = x * cos - rotated(x * sin): the gradient. Rows lie in the dimensions of `sizes`;
// the columns of a row lie together.
struct Rope {
  void* y;
  const void* x;
  const void* cos;
  const void* sin;
  int64_t y_strides[kMostDims];
  int64_t x_strides[kMostDims];
  int64_t cos_strides[kMostDims];  // 0 where it is repeated, as those of sin
  int64_t sin_strides[kMostDims];
  int64_t sizes[kMostDims];
  int dims;  // at least 1
  int64_t rows;
  int64_t half;
  bool interleaved;  // pairs are neighbours; else they lie `half` columns apart
  bool transposed;
  DType dtype;
};

// The elements of a weight. `own`: those of x.
enum class Numbers : int { own, int8, float8 };

// The most weights of one product.
constexpr int kMostWeights = 3;

// The most bytes of x, and of the weight of its norm, that each block of a kernel holds in shared memory.
constexpr int64_t kMostHeld = 32 << 10;

// y = act(x W^T + bias) for a few rows of x, or, where it is gated, act(g) * u with the halves g, u of x W^T + bias.
// With a scale, each row of the weight has a factor, and the weight may consist of several tensors of rows.
// With a norm, x is first normalized: s = x + residual, then s / sqrt(mean(s^2) + eps) * (offset + norm).
struct SkinnyProduct {
  void* y;             // (rows, out), dense
  const void* x;       // (rows, in), the elements of a row together
  const void* weight;  // (out, in), of twice as many rows where it is gated
  const void* bias;    // one for each row of the weight, or null
  const void* scale;   // one for each row of the weight, or null
  // Of the rows from starts[i] on: their weight and their scale.
  const void* weights[kMostWeights - 1];
  const void* scales[kMostWeights - 1];
  int64_t starts[kMostWeights - 1];
  const void* norm;       // (in,), or null
  const void* norm_bias;  // (in,), or null; only with `norm`
  const void* residual;   // (rows, in), dense, or null
  void* sum;              // (rows, in), dense: s, with a residual
  double eps;
  double offset;
  int64_t rows;
  int64_t in;
  int64_t out;
  int64_t x_stride;       // of rows
  int64_t weight_stride;  // of rows, whose elements lie together; of columns where it is transposed
  double slope;
  int activation;
  bool centers;     // whether the norm subtracts the mean, as a layer norm
  bool transposed;  // the weight's columns lie together
  bool gated;
  bool gate_first;
  bool early;   // whether the weight may be read before the kernels ahead have ended
  DType dtype;  // f16 or bf16
  DType scale_dtype;
  Numbers numbers;  // of the weight
};

// y = act(conv(x) + bias) of channels-last images, in which each channel has a filter of its own.
struct DepthwiseConvolution {
  void* y;             // (images, out_height, out_width, channels)
  const void* x;       // (images, height, width, channels)
  const void* weight;  // (kernel, kernel, channels)
  const void* bias;    // (channels), or null
  int64_t images;
  int channels;  // a multiple of 8
  int height;
  int width;
  int out_height;
  int out_width;
  int kernel;  // 3, 5 or 7
  int stride;  // 1, or up to a kernel of 5 also 2
  int pad_top;
  int pad_left;
  int activation;
  double slope;
  DType dtype;  // f16 or bf16
};

// One step of attention over a cache of keys and values, which gets those of the step: with k and v in their place,
// y = softmax(q keys^T * scale + mask) values for each head. Neighbouring heads of queries share one of keys. Strides
// are those of batch, head and, of caches and mask, place; the elements of a head lie together.
struct DecodeAttention {
  void* y;        // (batch, heads, size)
  const void* q;  // (batch, heads, size)
  const void* k;  // (batch, heads / sharing, size), as v
  const void* v;
  void* keys;  // (batch, heads / sharing, capacity, size), as values
  void* values;
  const int64_t* position;  // on the device: the place of k and v
  const void* mask;         // (batch, heads, capacity), boolean where true is seen, or added; or null
  const void* cos;          // (batch, size), or null where q and k are not to be rotated as in Rope; as sin
  const void* sin;
  const void* q_norm;  // (size): weight of an RMS norm before the rotation, or null; as k_norm
  const void* k_norm;
  double eps;
  double offset;  // of the weights of the norms
  int64_t q_strides[2];
  int64_t k_strides[2];
  int64_t v_strides[2];
  int64_t key_strides[3];
  int64_t value_strides[3];
  int64_t mask_strides[3];
  int64_t cos_stride;
  int64_t sin_stride;
  int64_t batch;
  int64_t heads;
  int64_t sharing;
  int64_t capacity;
  int64_t size;
  double scale;
  bool boolean;
  DType dtype;
  // The places are divided into so many parts, the results of which are put together from
  // (batch * heads, parts, size + 2) numbers of the accumulation type: of each part the sums, their weight and the
  // largest score. One part needs none.
  int64_t parts;
  void* partials;
};

// A step of generation after its scores: the token with the largest one of each row, and what is counted on. Integers
// lie together in memory.
struct NextToken {
  const void* scores;     // (rows, words), the words of a row together
  const bool* held_back;  // (words) or null: not before *length reaches *least
  const int64_t* least;   // on the device, as length
  const int64_t* ends;    // (end_count) or null: a row is finished after one of them
  int64_t* sequences;     // (rows, width): gets the tokens in column *length
  int64_t* length;        // counts on, unless ends are given and all rows had been finished
  bool* finished;         // (rows): such a row gets `pad` where ends are given
  int64_t* inputs;        // (rows): gets the tokens
  int64_t* position;      // counts on
  int64_t* position_ids;  // (rows) or null: count on
  int64_t* scratch;       // (2 * rows * parts + 1), the last of which is 0 before and after
  int64_t score_stride;   // of rows
  int64_t rows;
  int64_t words;
  int64_t width;
  int64_t end_count;
  int64_t pad;
  int64_t parts;  // so many blocks read a row, at most
  DType dtype;    // of scores
};

// What is added up, of x and other. The numbers are those of kfconvert/ops/standalone/reduce.py, which has no identity.
enum class Term : int {
  identity = 0,
  square = 1,
  magnitude = 2,
  squared_difference = 3,
};

// y = factor * (the sum of the terms of a row), or of each of the `parts` parts of a row: `part` columns each, the
// last one what is left.
struct Reduce {
  void* y;            // (rows, parts)
  const void* x;      // (rows, cols)
  const void* other;  // (rows, cols) or null: of the squared difference only
  int64_t rows;
  int64_t cols;
  int64_t part;
  int64_t parts;
  double factor;
  Term term;
  DType dtype;  // of x and other
  DType out;    // of y
};

// grad_x = factor * (the gradient of the row) * (the derivative of the term); grad_other = -grad_x.
struct ReduceBackward {
  void* grad_x;       // (rows, cols)
  void* grad_other;   // (rows, cols) or null
  const void* x;      // (rows, cols)
  const void* other;  // (rows, cols) or null: of the squared difference only
  const void* grad;   // (rows)
  int64_t rows;
  int64_t cols;
  double factor;
  Term term;
  DType dtype;       // of x, other, grad_x and grad_other
  DType grad_dtype;  // of grad: dtype, or its accumulation type
};

// y = act((x - mean(x)) * rstd(x) * weight + bias), statistics over rows of channels * inner elements: the
// `channels` channels of one of `groups` groups of an image. Channel c of row r has weight (r % groups) *
// channels + c.
struct GroupNorm {
  void* y;             // (rows, channels, inner)
  void* mean;          // (rows), accumulation type, or null
  void* rstd;          // (rows), accumulation type, or null
  const void* x;       // (rows, channels, inner)
  const void* weight;  // (groups, channels) or null
  const void* bias;    // (groups, channels) or null
  void* partials;      // (rows, parts, 2), accumulation type: mean and sum of squared deviations of a part; or null
  int64_t rows;        // images * groups
  int64_t groups;
  int64_t channels;
  int64_t inner;
  int64_t parts;       // of a row, more than one of which need partials; 0: x is not taken as it is
  int64_t part;        // elements of a part (channels last: positions), of the last one what is left
  bool channels_last;  // x and y: (images, inner, groups * channels)
  double eps;
  DType dtype;
  int activation;
  double slope;
};

// xhat = (x - mean) * rstd; v = xhat * weight + bias; g = grad * act'(v); grad_x = rstd * (g weight - mean(g weight) -
// xhat mean(g weight xhat)), means over rows as above; grad_weight = sum g xhat and grad_bias = sum g, over the images
// and the positions of a channel.
struct GroupNormBackward {
  void* grad_x;        // (rows, channels, inner)
  void* grad_weight;   // (groups, channels) or null
  void* grad_bias;     // (groups, channels) or null
  void* sums_weight;   // (rows, channels), accumulation type: the sums over the positions of one image
  void* sums_bias;     // (rows, channels), accumulation type
  const void* grad;    // (rows, channels, inner)
  const void* x;       // (rows, channels, inner)
  const void* mean;    // (rows), accumulation type
  const void* rstd;    // (rows), accumulation type
  const void* weight;  // (groups, channels) or null
  const void* bias;    // (groups, channels) or null
  int64_t rows;        // images * groups
  int64_t groups;
  int64_t channels;
  int64_t inner;
  DType dtype;
  int activation;
  double slope;
};

// s = x + residual; y = act((s - mean) * rstd * (weight + offset) + bias), over rows of `cols` elements.
// Layer norm (centred): mean = mean(s), rstd = 1 / sqrt(mean((s - mean)^2) + eps); RMS norm: the same with mean = 0.
struct LayerNorm {
  void* y;               // (rows, cols)
  void* sum;             // (rows, cols) or null
  void* mean;            // (rows), accumulation type, or null
  void* rstd;            // (rows), accumulation type, or null
  const void* x;         // (rows, cols)
  const void* residual;  // (residual_rows, cols), repeated over the rows of x, or null
  const void* weight;    // (cols) or null
  const void* bias;      // (cols) or null
  int64_t rows;
  int64_t residual_rows;  // divides rows
  int64_t cols;
  double eps;
  double offset;  // added to the weight, where there is one
  bool centred;
  DType dtype;
  DType affine_dtype;  // that of weight and bias: dtype, or f32 beside a half type
  int activation;
  double slope;
};

// Rows of a table, one for each row of the result.
struct RowIds {
  const void* data;  // null: row 0 of the table, always
  bool narrow;       // int32, else int64
  int64_t count;     // rows of the table
};

// On the host. Static: every kernel file has its own, built for its instruction set.
static inline int64_t id_at(const RowIds& ids, int64_t row) {
  if (ids.data == nullptr) return 0;
  return ids.narrow ? static_cast<const int32_t*>(ids.data)[row] : static_cast<const int64_t*>(ids.data)[row];
}

// s = word[ids] + position[row % positions] + token_type[token_type_ids], in the place of x of a layer norm.
struct EmbeddingLayerNorm {
  LayerNorm norm;          // y, weight, bias, rows, cols, eps, centred and the dtypes; the rest is null or 0
  const void* word;        // (ids.count, cols)
  const void* position;    // (positions, cols)
  const void* token_type;  // (token_type_ids.count, cols)
  RowIds ids;
  RowIds token_type_ids;
  int64_t positions;
};

// w = weight + offset; v = xhat * w + bias; g = grad * act'(v) (from v, or from act(v): recomputed, never stored)
// grad_x = rstd * (g w - mean(g w) - xhat mean(g w xhat)) + grad_sum; grad_weight = sum g xhat; grad_bias =
// sum g. In an RMS norm the mean of s, and with it mean(g w), is 0.
struct LayerNormBackward {
  void* grad_x;          // (rows, cols)
  void* partial_weight;  // (partials, cols), accumulation type, or null; the caller adds up the partials
  void* partial_bias;    // (partials, cols), accumulation type, or null
  const void* grad;      // (rows, cols)
  const void* grad_sum;  // (rows, cols) or null
  const void* s;         // (rows, cols)
  const void* mean;      // (rows), accumulation type; null: an RMS norm
  const void* rstd;      // (rows), accumulation type
  const void* weight;    // (cols) or null
  const void* bias;      // (cols) or null
  int64_t rows;
  int64_t cols;
  int64_t partials;
  double offset;
  DType dtype;
  DType affine_dtype;
  int activation;
  double slope;
};

// Where the mask of a row lies: the rows are those of dims leading dimensions, outermost first.
constexpr int kMaskDims = 4;
struct RowMask {
  const void* data;  // null where there is no mask
  bool boolean;      // one byte an element, 0: the element counts as -inf; else to be added, in the dtype of x
  int dims;
  int64_t sizes[kMaskDims];
  int64_t strides[kMaskDims];  // 0 where it is repeated
  int64_t inner;               // 1, or 0: one element for the whole row
};

// y = softmax(x * scale + mask) over rows of `cols` elements; with `grad`, x being such an output y: y = scale * x *
// (grad - sum(grad * x)), 0 where the mask, which then is boolean, is False.
struct Softmax {
  void* y;           // (rows, cols)
  const void* x;     // (rows, cols)
  const void* grad;  // (rows, cols) or null
  RowMask mask;
  int64_t rows;
  int64_t cols;
  double scale;
  DType dtype;
};

// loss = (1 - smoothing) * (lse - x[target]) + smoothing * (lse - mean(x)) with lse = log(sum(exp(x))), over rows of
// `cols` elements; 0 where target is `ignored`. With grad_x: grad_x = grad * dloss/dx, from the two parts of lse, which
// in one number would lose the digits that a small loss consists of.
struct CrossEntropy {
  void* result;      // the mean or the sum of the losses of rows that count, in the dtype of x; or null
  void* weight;      // accumulation type: what each loss counts in the result, 1 / (rows that count) or 1; or null
  void* loss;        // (rows), accumulation type
  void* lse;         // (rows, 2), accumulation type: largest = max(x) and log(sum(exp(x - largest)))
  void* grad_x;      // (rows, cols) or null
  const void* grad;  // (rows), accumulation type, or with grad_stride 0 one for all in the dtype of x, times weight
  const void* x;     // (rows, cols)
  const int64_t* target;  // (rows), each at least 0 and less than cols, or `ignored`
  int64_t ignored;
  int64_t rows;
  int64_t cols;
  int64_t grad_stride;
  bool mean;
  double smoothing;
  DType dtype;
};

}  // namespace kfc
