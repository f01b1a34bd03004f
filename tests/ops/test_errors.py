"""Arguments that do not fit together: one line that names the operator, with and without compiled kernels."""

import pytest
import torch

from kfconvert import extension, ops

OPERATORS = torch.ops.kfconvert
t = torch.randn
X, ROW, IMAGE, KERNEL = t(4, 8), t(8), t(2, 8, 7, 9), t(12, 8, 3, 3)
CHANNELS, Q, K, V, WIDE = t(12), t(2, 3, 20, 8), t(2, 3, 24, 8), t(2, 3, 24, 8), t(2, 3, 8)
ANGLES, BLOCKS = t(20, 8), torch.ones(3, 3, dtype=torch.bool)
IDS, TABLES, BYTES = torch.arange(10).view(2, 5), [t(11, 8), t(7, 8), t(2, 8)], torch.zeros(4, 8, 3, dtype=torch.uint8)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
FLOATS = "expected float64, float32, float16 or bfloat16"
IMAGES = r"expected \(N, C, ...\)"


def conv2d_bn_act(x, weight, bias, mean):
    return ops.conv2d_bn_act(x, weight, bias, mean, CHANNELS.abs(), None, None, "relu")


def separable(x, depthwise, pointwise, activation="relu"):
    return ops.depthwise_pointwise(x, depthwise, None, pointwise, None, activation)


def batch_norm_relu(x=X, weight=ROW, bias=ROW, mean=ROW, variance=ROW, **options):
    return ops.batch_norm_relu(x, weight, bias, mean, variance, **options)


def embedding(ids=IDS, word=TABLES[0], position=TABLES[1], token_type=TABLES[2], weight=ROW, **options):
    return ops.embedding_layer_norm(ids, word, position, token_type, weight, ROW, **options)


def sparse(layout, size=8):
    return ops.block_sparse_attention(Q, K, V, layout, size)


PRODUCT = "ij,kj->ik"
# (operator, positional arguments, a part of the message)
ERRORS = [
    (ops.act_mul, (X, X[:, :3], "silu"), r"shapes \(4, 8\) and \(4, 3\) do not broadcast"),
    (ops.act_mul, (X, X.double(), "silu"), "other has another dtype than x"),
    (ops.add_relu, (X, X[:, 0]), r"shapes \(4, 8\) and \(4,?\) do not broadcast"),
    (ops.add_relu, (X.int(), X.int()), FLOATS),
    (ops.attention_dropout, (X.long(), 0.3), FLOATS),
    (ops.attention_score, (Q.long(), K), FLOATS),
    (ops.attention_score, (Q, K.double()), "k has another dtype than q"),
    (ops.attention_score, (Q, K[..., :5]), r"expected \(..., N, D\) and \(..., M, D\)"),
    (ops.attention_score, (Q, K[:, :2]), "do not broadcast"),
    (ops.batch_norm_act, (X, ROW[:3], ROW), r"mean has shape \(3,?\), but x has 8 channels in dim 1"),
    (ops.batch_norm_act, (X, ROW, ROW, ROW.double()), "weight has another dtype than mean"),
    (ops.batch_norm_act, (X, ROW.half(), ROW.half()), "mean has another dtype than x"),
    (ops.batch_norm_act, (X[0], ROW, ROW), IMAGES),
    (ops.batch_norm_act, (X.int(), ROW, ROW), FLOATS),
    (batch_norm_relu, (X.long(),), FLOATS),
    (batch_norm_relu, (X[0, 0],), IMAGES),
    (batch_norm_relu, (X, ROW, ROW, None), "needed outside of training"),
    (batch_norm_relu, (X, ROW[:3]), r"weight has shape \(3,?\), but x has 8 channels in dim 1"),
    (batch_norm_relu, (X, ROW.double()), "weight has another dtype than mean"),
    (batch_norm_relu, (X.half(), ROW.half()), "weight has another dtype than mean"),
    (ops.bias_act, (X, ROW[:5]), r"bias has shape \(5,?\), but x has 8 channels"),
    (ops.bias_act, (X, None, X[:2]), r"residual has shape \(2, 8\), expected \(4, 8\)"),
    (ops.bias_act, (X, ROW.double()), "bias has another dtype than x"),
    (ops.bias_act, (X, None, X.half()), "residual has another dtype than x"),
    (ops.bias_act, (X.int(),), FLOATS),
    (ops.bias_act, (X, ROW, None, "relu", 0.01, 2), "dim 2 is out of range"),
    (ops.bias_dropout_add, (X, ROW[:3], X), r"bias has shape \(3,?\), but x has 8 channels"),
    (ops.bias_dropout_add, (X, ROW, X[:2]), r"residual has shape \(2, 8\), expected \(4, 8\)"),
    (ops.bias_dropout_add, (X, ROW, X.double()), "residual has another dtype than x"),
    (ops.bias_dropout_add, (X.int(), None, X.int()), FLOATS),
    (sparse, (BLOCKS.float(),), "layout is not boolean"),
    (sparse, (BLOCKS[:2],), r"layout has shape \(2, 3\), expected \(2, 3, 3, 3\)"),
    (sparse, (BLOCKS.expand(2, 3, 3),), "or what broadcasts to it"),
    (sparse, (BLOCKS, 0), "block_size is 0"),
    (ops.chunked_attention, (Q, K, V, 0), "chunk_size is 0, expected 1 or more"),
    (ops.chunked_attention, (Q, K[:1], V, 8), "has other leading dimensions"),
    (ops.contract, (PRODUCT,), "there is no tensor"),
    (ops.contract, (PRODUCT, X, X.double()), "tensor 1 has another dtype than tensor 0"),
    (ops.contract, ("ij->i", X.long()), FLOATS),
    (ops.contract, ("ij,jk->ik", X, X), "einsum"),
    (ops.contract, ("ij,j", X), "einsum"),
    *(
        (
            lambda shape: ops.contract(PRODUCT, X, X, shape=shape),
            (shape,),
            "does not have as many elements as the result of shape",
        )
        for shape in ((15,), (-1, -1), (-1, 3), (-2, -8))
    ),
    (ops.conv_act, (IMAGE, KERNEL[:, :5]), "x has 8 channels, expected 5"),
    (ops.conv_act, (IMAGE[0, 0], KERNEL), "does not fit weight of shape"),
    (ops.conv_act, (IMAGE, KERNEL, CHANNELS[:5]), r"bias has shape \(5,?\), expected \(12,\)"),
    (ops.conv_act, (IMAGE, KERNEL.double()), "weight has another dtype than x"),
    (ops.conv_act, (IMAGE, KERNEL, CHANNELS, IMAGE.half()), "residual has another dtype than x"),
    (ops.conv_act, (IMAGE, KERNEL, CHANNELS, IMAGE), "residual has shape|must match the size"),
    (ops.conv_act, (IMAGE, KERNEL[:9, :4], None, None, 1, 0, 1, 2), "groups|divisible"),
    *(
        (lambda stride: ops.conv_act(IMAGE, KERNEL, padding="same", stride=stride), (stride,), "needs a stride of 1")
        for stride in (2, (2,), (1, 2))
    ),
    (conv2d_bn_act, (IMAGE, KERNEL[0], None, CHANNELS), r"expected \(out, in / groups, height, width\)"),
    (conv2d_bn_act, (IMAGE, KERNEL, None, CHANNELS[:3]), "mean has shape"),
    (conv2d_bn_act, (IMAGE, KERNEL, CHANNELS[:3], CHANNELS), "bias has shape"),
    (conv2d_bn_act, (IMAGE, KERNEL, CHANNELS.half(), CHANNELS), "bias has another dtype"),
    (conv2d_bn_act, (IMAGE, KERNEL.half(), None, CHANNELS), "weight has another dtype"),
    (ops.conv2d_gelu_dropout, (IMAGE, KERNEL[:, :, 0], None, 0.1), "weight has shape"),
    (ops.conv2d_gelu_dropout, (IMAGE[:, :3], KERNEL, None, 0.1), "x has 3 channels, expected 8"),
    (ops.cross_entropy, (X[0], IDS[0]), r"x has shape \(8,?\), expected \(rows, classes\)"),
    (ops.cross_entropy, (X, IDS[0, :3]), r"target has shape \(3,?\), expected \(4,?\)"),
    (ops.cross_entropy, (X, IDS[0, :4].int()), "target must be int64"),
    (ops.cross_entropy, (X.int(), IDS[0, :4]), FLOATS),
    (separable, (IMAGE[:, :3], t(8, 1, 3, 3), t(6, 8, 1, 1)), "3 groups|divisible"),
    (separable, (IMAGE, t(8, 1, 3, 3), t(6, 4, 1, 1)), r"expected \(out, 8, 1, 1\)"),
    (separable, (IMAGE, t(1, 3, 3), t(6, 8, 1, 1)), "depthwise_weight has shape"),
    (separable, (IMAGE[0, 0], t(8, 1, 3, 3), t(6, 8, 1, 1)), "x has shape"),
    (separable, (IMAGE, t(8, 1, 3, 3).half(), t(6, 8, 1, 1)), "weight has another dtype than x"),
    (ops.dequantize_int8, (X, 0.1), "expected int8"),
    (ops.dequantize_int8, (X.to(torch.int8), 0.1, 0, -1, torch.int32), "expected float64, float32"),
    (embedding, (IDS.float(),), "ids must be int32 or int64"),
    (embedding, (IDS[0, 0],), "ids has no dimension"),
    (embedding, (IDS.repeat(1, 2),), "position has shape .*, expected 10 or more rows of 8"),
    (embedding, (IDS, X[0]), r"word has shape \(8,\), expected \(V, D\)"),
    (embedding, (IDS, *TABLES[:2], TABLES[2][:, :4]), "token_type has shape"),
    (embedding, (IDS, *TABLES[:2], TABLES[2][:0]), "expected 1 or more rows of 8"),
    (embedding, (IDS, TABLES[0], TABLES[1].double()), "position has another dtype than word"),
    (embedding, (IDS, *TABLES, ROW[:4]), r"weight has shape \(4,\), expected \(8,\)"),
    (embedding, (IDS, *TABLES, ROW.double()), "weight has another dtype than word"),
    (embedding, (IDS, *(table.long() for table in TABLES)), "expected float64"),
    (lambda *_: embedding(token_type_ids=IDS[:1]), (), r"token_type_ids has shape \(1, 5\), expected \(2, 5\)"),
    (ops.ffn_block, (X, KERNEL, None, KERNEL, None), "does not fit weight"),
    (ops.flash_attention, (Q, K[:1], V), "has other leading dimensions"),
    (ops.flash_attention, (Q, K, V[..., :5, :]), r"v has shape \(2, 3, 5, 8\), but k of shape"),
    (ops.flash_attention, (Q[0, 0, 0], K, V), r"expected \(..., N, D\)"),
    (ops.flash_attention, (Q, K, V.half()), "v has another dtype"),
    (ops.fused_multihead_attention, (Q, K, V, 3), "8 columns of q and k and 8 of v cannot be divided into 3 heads"),
    (ops.fused_multihead_attention, (Q, K, V, 0), "cannot be divided into 0 heads"),
    (ops.group_norm_act, (X, 3), "8 channels do not make 3 groups"),
    (ops.group_norm_act, (X, 0), "8 channels do not make 0 groups"),
    (ops.group_norm_act, (X, 2, ROW[:5]), r"weight has shape \(5,?\), but x has 8 channels"),
    (ops.group_norm_act, (X, 2, ROW, ROW.double()), "bias has another dtype than x"),
    (ops.group_norm_act, (X.int(), 2), FLOATS),
    (ops.group_norm_act, (X[0, 0], 2), IMAGES),
    *(
        (norm, given, message)
        for norm in (ops.layer_norm_act, ops.rms_norm_act, ops.layer_norm_silu, ops.rms_norm_gelu)
        for given, message in (
            ((X, 5), "normalized_shape does not fit the last dimensions of x of shape"),
            ((X, (2, 4, 8)), "normalized_shape does not fit"),
            ((X, 8, ROW.view(2, 4)), r"weight has shape \(2, 4\), expected \(8,?\)"),
            ((X, 8, ROW.double()), "weight has another dtype than x"),
            ((X.long(), 8), FLOATS),
        )
    ),
    (ops.layer_norm_act, (X, 8, ROW, ROW.view(1, 8)), r"bias has shape \(1, 8\), expected \(8,?\)"),
    (ops.layer_norm_act, (X, 8, ROW, ROW.half()), "another dtype than x"),
    *(
        (norm, (WIDE, t(shape), 8), "residual has shape")
        for norm in (ops.add_layer_norm, ops.add_rms_norm)
        for shape in ((2, 3, 1), (2, 1, 8), (1, 2, 3, 8), (4, 8), (1,))
    ),
    (ops.linear_act, (X, t(8, 6)), r"x of shape \(4, 8\) does not fit weight of shape \(8, 6\) \(out, in\)"),
    (ops.linear_act, (X, t(6, 8), ROW[:3]), r"bias has shape \(3,?\), expected \(6,\)"),
    (ops.linear_act, (X, t(6, 8).double()), "weight has another dtype than x"),
    (ops.linear_act, (X, t(6, 8), ROW[:6].half()), "bias has another dtype than x"),
    (ops.mse_loss, (X.int(), X), FLOATS),
    (ops.mse_loss, (X, X.double()), "y has another dtype than x"),
    (ops.mse_loss, (X, X[:, 0]), r"shapes \(4, 8\) and \(4,?\) do not broadcast"),
    (ops.normalize_image, (BYTES.float(), MEAN, STD), "expected uint8"),
    (ops.normalize_image, (BYTES[0], MEAN, STD), r"shape \(8, 3\), expected \(H, W, C\) or \(N, H, W, C\)"),
    (lambda *_: ops.normalize_image(BYTES, MEAN, STD, dtype=torch.int32), (), FLOATS),
    (ops.normalize_image, (BYTES, MEAN[:2], STD), "mean has 2 values, but image has 3 channels"),
    (ops.normalize_image, (BYTES, MEAN, (*STD, 1)), "std has 4 values, but image has 3 channels"),
    (ops.normalize_image, (BYTES, MEAN, ROW[:4]), r"std has shape \(4,\), expected \(3,\)"),
    (ops.normalize_image, (BYTES, ROW[:3, None], STD), r"mean has shape \(3, 1\), expected \(3,\)"),
    (ops.normalize_image, (BYTES, MEAN, (1, 0, 1)), "std has a value of 0"),
    (
        lambda form: ops.normalize_image(BYTES, MEAN, STD, memory_format=form),
        (torch.channels_last_3d,),
        "memory_format must be torch.contiguous_format or torch.channels_last",
    ),
    *(
        (lambda crop: ops.normalize_image(BYTES, MEAN, STD, crop=crop), (crop,), r"crop \(.*\) is not inside .* 4 x 8$")
        for crop in ((0, 0, 5, 8), (0, 1, 4, 8), (-1, 0, 2, 2), (0, 0, -1, 2), (4, 8, 1, 1))
    ),
    (ops.prelu_bias, (X, ROW, ROW[:3]), r"bias has shape \(3,?\), but x has 8 channels"),
    (ops.prelu_bias, (X, ROW[:3], ROW), r"weight has shape \(3,?\)"),
    (ops.prelu_bias, (X, ROW, ROW.double()), "bias has another dtype than x"),
    (ops.prelu_bias, (X.int(), ROW.int(), ROW.int()), FLOATS),
    (ops.prelu_bias, (X, ROW, ROW, 2), r"dim 2 is out of range for x of shape \(4, 8\)"),
    (ops.quantize_int8, (X.int(), 0.1), FLOATS),
    (ops.quantize_int8, (X, ROW[:3]), r"scale has shape \(3,?\), but x has 8 channels in dim -1"),
    (ops.quantize_int8, (X, 0.1, X), r"zero_point has shape \(4, 8\), but x has 8 channels"),
    (ops.quantize_int8, (X, ROW, 0, 2), r"dim 2 is out of range for x of shape \(4, 8\)"),
    (ops.reduce_sum_squared, (X.int(),), FLOATS),
    (ops.reduce_sum_squared, (X, (1, -1)), r"dim \(1, -1\) names a dimension twice"),
    (ops.reduce_mean_abs, (X, 2), r"dim 2 is out of range for x of shape \(4, 8\)"),
    (ops.reduce_mean_abs, (X[0, 0], -2), "dim -2 is out of range for x of shape"),
    (ops.rope, (Q[..., :7], ANGLES, ANGLES), "expected an even last dimension"),
    (ops.rope, (Q, ANGLES[:5], ANGLES), r"cos has shape \(5, 8\), expected \(2, 3, 20, 8\) or what broadcasts"),
    (ops.rope, (Q, ANGLES, ANGLES[..., :1]), "sin has shape .* with 8 columns"),
    (ops.rope, (Q, ANGLES, ANGLES.double()), "sin has another dtype"),
    (ops.rope, (Q[0, 0], ANGLES[None], ANGLES), "cos has shape"),
    (ops.rope_attention, (Q, K, V, ANGLES, ANGLES), r"cos has shape \(20, 8\), expected \(2, 3, 24, 8\)"),
    (ops.scale_shift_act, (X, ROW[:5], ROW), r"scale has shape \(5,?\), but x has 8 channels"),
    (ops.scale_shift_act, (X, ROW, ROW[None]), r"shift has shape \(1, 8\), but x has 8 channels"),
    (ops.scale_shift_act, (X, ROW.double(), ROW), "scale must be float32"),
    (ops.scale_shift_act, (X.half(), ROW.half(), ROW), "scale must be float32"),
    (ops.scale_shift_act, (X.double(), ROW.double(), ROW), "shift must be float64"),
    (ops.scale_shift_act, (X.int(), ROW, ROW), FLOATS),
    (ops.scale_shift_act, (X[0, 0], ROW, ROW), IMAGES),
    (ops.sliding_window, (X, 9, 1), "size must be between 1 and 8, got 9"),
    (ops.sliding_window, (X, 0, 1), "size must be between 1 and 8, got 0"),
    (ops.sliding_window, (X, 3, 0), "stride is 0, expected 1 or more"),
    (ops.sliding_window, (X[0, 0], 1, 1), "x has no dimension"),
    (ops.sliding_window_mean_std, (X, 9), "window must be between 1 and 8, got 9"),
    (ops.sliding_window_mean_std, (X.long(), 2), FLOATS),
    (ops.softmax, (X.int(),), FLOATS),
    (ops.softmax, (X, -1, 1.0, X[:, :3]), r"mask of shape \(4, 3\) does not broadcast to \(4, 8\)"),
    (ops.softmax, (X, -1, 1.0, X[None]), r"mask of shape \(1, 4, 8\) does not broadcast"),
    (ops.softmax, (X, -1, 1.0, X.double()), "mask must be boolean or have the dtype of x"),
    (ops.SoftMaxOp().backward, (X[:2], X), "have different shapes"),
    (ops.SoftMaxOp().backward, (X.double(), X), "grad has another dtype than output"),
    (ops.SoftMaxOp().backward, (X[0, 0], X[0, 0]), "have different shapes"),
]
SHARE = "must be between 0 and 1, got"
OTHER_ERRORS = [
    (IndexError, lambda: ops.softmax(X, 2), "dim 2 is out of range"),
    (ValueError, lambda: ops.attention_dropout(X, 1.5, False), f"p {SHARE}"),
    (ValueError, lambda: ops.bias_act(X, activation="swish"), "unknown activation 'swish'; known: none, relu"),
    (ValueError, lambda: ops.conv2d_gelu_dropout(IMAGE, KERNEL, None, -0.1), f"p {SHARE}"),
    (ValueError, lambda: ops.conv_act(IMAGE, KERNEL, padding="full"), 'padding must be numbers, "valid" or "same"'),
    (ValueError, lambda: ops.cross_entropy(X, IDS[0, :4], reduction="max"), "must be none, sum or mean, got 'max'"),
    (ValueError, lambda: ops.cross_entropy(X, IDS[0, :4], label_smoothing=2), f"label_smoothing {SHARE} 2"),
    (ValueError, lambda: ops.ffn_block(X, t(6, 8), None, t(3, 6), None, "gelu", 1.5), f"dropout_p {SHARE}"),
    (ValueError, lambda: ops.gelu_dropout(X, 1.5), f"p {SHARE} 1.5"),
    (ValueError, lambda: ops.mse_loss(X, X, "max"), "reduction must be mean, sum or none, got 'max'"),
    (ValueError, lambda: ops.sliding_window(X, 3, 1, "median"), "must be mean, sum, max, min or std, got 'median'"),
    (ValueError, lambda: batch_norm_relu(X[:1], training=True), "more than 1 value per channel"),
    *(
        (ValueError, call, "unknown activation 'mish'")
        for call in (
            lambda: ops.act_mul(X, X, "mish"),
            lambda: ops.linear_act(X, t(6, 8), activation="mish"),
            lambda: ops.rms_norm_act(X, 8, activation="mish"),
            lambda: separable(IMAGE, t(8, 1, 3, 3), t(6, 8, 1, 1), "mish"),
        )
    ),
    (TypeError, lambda: ops.contract(PRODUCT, X, X, shape=16), "shape must be a tuple of integers, got int"),
    (TypeError, lambda: ops.contract(PRODUCT, X, X, shape=(2.5, 4)), "shape must be an integer, got float"),
    (TypeError, lambda: ops.contract(PRODUCT, X, [1.0]), "tensors must be tensors, got list"),
    (TypeError, lambda: ops.contract(X, X), "equation must be text, got Tensor"),
    (TypeError, lambda: ops.SoftMaxOp(3), "module must have forward and backward, got int"),
    *(
        (TypeError, lambda crop=crop: ops.normalize_image(BYTES, MEAN, STD, crop=crop), match)
        for crop, match in (
            *((crop, r"crop must be \(top, left, height, width\)") for crop in (3, (1, 2), "text")),
            *((crop, "crop must be an integer") for crop in ((0, 0, 2.5, 2), (0, 0, None, 2), (0, 0, True, 2))),
        )
    ),
]


@pytest.mark.parametrize("number", range(len(ERRORS)))
def test_one_line_names_what_does_not_fit(compiled, number):
    operator, arguments, message = ERRORS[number]
    with pytest.raises(RuntimeError, match=message) as error:
        operator(*arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("number", range(len(OTHER_ERRORS)))
def test_other_kinds_of_errors(compiled, number):
    kind, call, message = OTHER_ERRORS[number]
    with pytest.raises(kind, match=message) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "arguments,match",
    [
        ({"stride": 0}, r"stride \(0, 0\) and dilation \(1, 1\) must be positive"),
        ({"stride": (1, -1)}, r"stride \(1, -1\) and dilation"),
        ({"dilation": 0}, r"dilation \(0, 0\) must be positive"),
        ({"padding": -1}, r"padding \(-1, -1\) not negative"),
        ({"dilation": 9}, r"x of shape \(2, 8, 7, 9\) with padding \(0, 0\) is smaller than weight of shape"),
        ({"padding": 10**12}, r"padding \(1000000000000, 1000000000000\) makes too large an output"),
        ({"padding": "same", "dilation": (1, 2, 3)}, r"dilation needs 1 or 2 numbers, got \(1, 2, 3\)"),
        ({"stride": (1, 2, 3)}, "needs? 1 or 2 numbers"),
        ({"x": t(2, 8, 0, 9), "padding": 1}, r"x of shape \(2, 8, 0, 9\) with padding \(1, 1\)"),
    ],
)
@pytest.mark.skipif(not extension.EXTENSION_LOADED, reason="no compiled kernels")
def test_geometry_of_convolutions(capfd, arguments, match):
    """Nothing else goes to stderr. Without kernels or with gradients, the error is ATen's."""
    given = {"x": t(2, 8, 7, 9), "weight": t(12, 8, 1, 3), "bias": CHANNELS, **arguments}
    with pytest.raises(RuntimeError, match=match) as error:
        ops.conv_act(**given)
    assert str(error.value).startswith("kfconvert::conv_act: ") and "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


LIKE, ONES, OPTIONS = torch.empty(0), torch.ones(3), (1, 1, False, False)
STATISTICS = torch.ones(8)  # of 4 rows and 2 groups
# Calls of operators that no public function makes, which the kernels check.
OF_KERNELS = [
    (OPERATORS.group_norm_act_backward, (X[:2], X, STATISTICS, STATISTICS, ROW, ROW, 2, 0, 0.01), "grad has shape"),
    (OPERATORS.group_norm_act_backward, (X.double(), X, STATISTICS, STATISTICS, ROW, ROW, 2, 0, 0.01), "another dtype"),
    (OPERATORS.group_norm_act_backward, (X, X, ROW[:4], STATISTICS, ROW, ROW, 2, 0, 0.01), "mean and rstd must have"),
    (OPERATORS.group_norm_act_backward, (X, X, STATISTICS, STATISTICS, ROW, ROW, 3, 0, 0.01), "do not make 3 groups"),
    (OPERATORS.reduce_rows, (X, None, 3, 1, False, False), "cannot reduce 3 dimensions"),
    (OPERATORS.reduce_rows, (X, X, 1, 1, False, False), "other belongs to differences only"),
    (OPERATORS.reduce_rows, (X, X[:1], 1, 3, False, False), "other has shape"),
    (OPERATORS.reduce_rows_backward, (X[:, 0], X, None, 3, *OPTIONS[1:]), "cannot reduce 3 dimensions"),
    (OPERATORS.reduce_rows_backward, (X[:, 0], X, X, *OPTIONS), "other belongs to differences only"),
    (OPERATORS.reduce_rows_backward, (X[:, 0], X, None, *OPTIONS[:3], True), "there is no other to have a gradient"),
    (OPERATORS.reduce_rows_backward, (X[:, 0].double(), X, None, *OPTIONS), "grad has neither the dtype of x nor"),
    (OPERATORS.reduce_rows_backward, (X, X, None, *OPTIONS), r"grad has shape \(4, 8\), expected \(4\)"),
    (OPERATORS.softmax_backward, (X, X, X, 1.0), "mask must be boolean"),
    (OPERATORS.softmax_backward, (X, X, X[:, :3] > 0, 1.0), "does not broadcast"),
    (OPERATORS.normalize_image, (BYTES.char(), None, None, MEAN, STD, LIKE, False), "expected uint8"),
    (OPERATORS.normalize_image, (BYTES, None, None, MEAN[:2], STD, LIKE, False), "a mean and a std for each of 3"),
    (
        OPERATORS.normalize_image,
        (t(4, 8, 5).byte(), None, None, [0.5] * 5, [0.5] * 5, LIKE, True),
        "in tensors for more",
    ),
    (OPERATORS.normalize_image, (BYTES, ONES, None, [], STD, LIKE, False), "both be tensors or both be numbers"),
    (OPERATORS.normalize_image, (BYTES, ONES, ONES.double(), [], [], LIKE, False), "std must be float32"),
    (OPERATORS.combine_act_inference, (X, None, 0, 0, 0.01), "other must be a tensor, got None"),
    (OPERATORS.batch_norm_act_inference, (X, None, ROW, None, None, 1e-5, 0, 0.01), "mean must be a tensor, got None"),
    (OPERATORS.scale_shift_act_inference, (X, ROW, None, 0, 0.01), "shift must be a tensor, got None"),
    (OPERATORS.rope_inference, (X, X, None, False, False), "sin must be a tensor, got None"),
]


@pytest.mark.skipif(not extension.EXTENSION_LOADED, reason="no compiled kernels")
@pytest.mark.parametrize("number", range(len(OF_KERNELS)))
def test_errors_of_the_kernels(number):
    operator, arguments, message = OF_KERNELS[number]
    with pytest.raises(RuntimeError, match=message):
        operator(*arguments)


def test_fake_tensors_are_checked():
    tables = [table.to("meta") for table in TABLES]
    assert ops.embedding_layer_norm(IDS.to("meta"), *tables, None, None).shape == (2, 5, 8)
    with pytest.raises(RuntimeError, match="bias has shape"):
        ops.embedding_layer_norm(IDS.to("meta"), *tables, None, t(3).to("meta"))
