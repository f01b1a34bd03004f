import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, check_gradients, check_operator, gradients
from support.selection import each_once

from kfconvert import ops
from kfconvert.ops.fused.layer_norm_act import reference

OPERATORS = torch.ops.kfconvert


def inputs(shape, normalized, dtype, device, affine_dtype=None):
    x, residual = torch.randn(shape) * 2 + 0.5, torch.randn(shape)
    weight, bias = torch.rand(normalized) + 0.5, torch.randn(normalized)
    return (
        *(t.to(device, dtype) for t in (x, residual)),
        *(t.to(device, affine_dtype or dtype) for t in (weight, bias)),
    )


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_as_accurate_as_aten(device, dtype, activation):
    x, residual, weight, bias = inputs((6, 5, 96), (96,), dtype, device)
    for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
        for r in (None, residual):
            check_operator(
                ops.layer_norm_act,
                reference,
                x,
                (96,),
                w,
                b,
                residual=r,
                activation=activation,
                negative_slope=0.2,
            )


# Every row length of the CUDA launch table, and the lengths around them that fall back to single elements.
LENGTHS = [
    1,
    2,
    7,
    8,
    31,
    64,
    65,
    128,
    129,
    256,
    384,
    512,
    768,
    1000,
    1024,
    1025,
    2048,
    3072,
    4096,
    8192,
    10000,
    40000,
]


@pytest.mark.parametrize("cols", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_row_lengths(device, cols, dtype):
    x, residual, weight, bias = inputs((5, cols), (cols,), dtype, device)
    for r in (None, residual):
        y, s = check_operator(ops.layer_norm_act, reference, x, cols, weight, bias, residual=r, return_sum=True)
        assert s is x if r is None else torch.equal(s, x + r)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 130, 4097])
def test_row_counts(device, rows):
    x, residual, weight, bias = inputs((rows, 64), (64,), torch.float32, device)
    check_operator(
        ops.layer_norm_act,
        reference,
        x,
        (64,),
        weight,
        bias,
        residual=residual,
        activation="relu",
        return_sum=True,
    )


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (0, 3, 4, 5), (2, 3, 0, 5)])
def test_several_normalized_dimensions(device, shape):
    for inner in (1, 2, 3):
        normalized = shape[-inner:]
        x, residual, weight, bias = inputs(shape, normalized, torch.float32, device)
        check_operator(ops.layer_norm_act, reference, x, normalized, weight, bias, residual=residual)


def test_any_strides(device):
    x, residual, weight, bias = inputs((4, 6, 16), (16,), torch.float32, device)
    permuted = residual.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for view, r in (
        (x.transpose(0, 1), residual.transpose(0, 1)),
        (x, permuted),
        (x[:, ::2], residual[:, ::2]),
    ):
        check_operator(ops.layer_norm_act, reference, view, (16,), weight.repeat(2)[::2], bias, residual=r)
    image = torch.randn(2, 16, 3, 3, device=device).permute(0, 2, 3, 1)
    check_operator(ops.layer_norm_act, reference, image, (16,), weight, bias)


def test_misaligned_pointer(device):
    x = torch.randn(8 * 64 + 1, device=device).half()[1:].view(8, 64)
    weight = torch.randn(65, device=device).half()[1:]
    check_operator(ops.layer_norm_act, reference, x, (64,), weight, None)


def test_large_mean_and_constant_rows(device):
    x = torch.randn(8, 256, device=device) + 1000
    check_operator(ops.layer_norm_act, reference, x, (256,))
    assert torch.equal(
        ops.layer_norm_act(torch.full((2, 64), 3.0, device=device), 64), torch.zeros(2, 64, device=device)
    )


@pytest.mark.parametrize("cols", [1, 3, 6, 7, 64, 100, 768, 1001, 4096, 5000, 20000])
def test_nothing_is_left_of_equal_values(device, cols):
    values = torch.tensor([0.1709, 1.3, -7.77, 1e4, 1e-4], device=device)
    x = values[:, None].expand(5, cols).contiguous()
    assert torch.equal(ops.layer_norm_act(x, (cols,), eps=1e-12), torch.zeros_like(x))


def test_nan_and_infinity(device):
    x = torch.randn(4, 32, device=device)
    x[0, 3], x[1, 4], x[2, 5] = float("nan"), float("inf"), -float("inf")
    for activation in ("none", "relu", "gelu", "silu"):
        got, want = (
            ops.layer_norm_act(x, 32, activation=activation),
            reference(x, (32,), activation=activation),
        )
        assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("columns", [7, 96, 1001, 4096, 9000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_parameters_beside_a_half_type(device, compiled, dtype, columns):
    x, residual, weight, bias = inputs((4, columns), (columns,), dtype, device, affine_dtype=torch.float32)
    if device == "cuda" and not compiled:
        return  # ATen itself has no such norm on CUDA
    got = ops.layer_norm_act(x, columns, weight, bias, residual=residual)
    want = reference(x.float(), (columns,), weight, bias, residual=residual.float())
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=0.05, rtol=0.02)
    if not compiled:
        return
    operator, exact = (
        lambda x, weight, bias, f=f: f(x, (columns,), weight, bias, activation="silu")
        for f in (ops.layer_norm_act, reference)
    )
    grad = torch.randn_like(x)
    found = gradients(operator, (x, weight, bias), (grad,))
    assert [g.dtype for g in found] == [dtype, torch.float32, torch.float32]
    wide = [t.double() for t in (x, weight, bias)]
    for mine, truth in zip(found, gradients(exact, wide, (grad.double(),)), strict=True):
        error = (mine.double() - truth).abs().max() / truth.abs().max()
        assert error < (torch.finfo(dtype).eps if mine.dtype == dtype else 1e-4)


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_gradients(device, activation, dtype):
    x, residual, weight, bias = inputs((6, 5, 96), (96,), dtype, device)
    weights = [torch.randn(x.shape, device=device).to(dtype) for _ in range(2)]

    def run(function):
        return lambda x, r, w, b: function(
            x, (96,), w, b, activation=activation, residual=r, return_sum=True, negative_slope=0.2
        )

    check_gradients(
        run(ops.layer_norm_act), run(reference), [x, residual, weight, bias], weights, activation=activation
    )


@pytest.mark.parametrize("cols", [64, 100, 768, 9000, 40000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_sums_that_vary_less_than_their_rounding(device, cols, dtype):
    """The statistics have to be those of the rounded sum: it is all that the backward has."""
    _, _, weight, bias = inputs((5, cols), (cols,), dtype, device)
    x, residual = (torch.full((5, cols), value, dtype=dtype, device=device) for value in (100.0, 0.3))
    leaves = [t.requires_grad_() for t in (x, residual, weight, bias)]
    grad = torch.randn(5, cols, device=device).to(dtype)
    y = ops.layer_norm_act(x, cols, weight, bias, residual=residual)
    of_x, of_residual, of_weight, of_bias = torch.autograd.grad(y, leaves, grad)

    exact = [t.detach().double().requires_grad_() for t in (x + residual, weight, bias)]
    want = torch.autograd.grad(F.layer_norm(exact[0], (cols,), *exact[1:]), exact, grad.double())
    assert torch.equal(of_x, of_residual)
    for ours, expected in zip((of_x, of_weight, of_bias), want, strict=True):
        largest = max(1, expected.abs().max().item())
        torch.testing.assert_close(ours.double(), expected, rtol=2**-7, atol=2**-7 * largest)


@pytest.mark.parametrize("cols", [1, 7, 64, 100, 257, 512, 768, 1024, 2048, 4096, 8192, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_row_lengths(device, cols, dtype):
    x, _, weight, bias = inputs((37, cols), (cols,), dtype, device)
    weights = [torch.randn(x.shape, device=device).to(dtype)]

    def run(function):
        return lambda x, w, b: function(x, (cols,), w, b)

    check_gradients(run(ops.layer_norm_act), run(reference), [x, weight, bias], weights)


def test_gradients_are_the_same_at_every_call(device):
    x, _, weight, bias = inputs((3000, 256), (256,), torch.float32, device)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    first, second = (
        torch.autograd.grad(ops.layer_norm_act(x, 256, weight, bias).square().sum(), leaves) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_empty_inputs(device):
    x, residual, weight, bias = (t.requires_grad_() for t in inputs((0, 8), (8,), torch.float32, device))
    y, s = ops.layer_norm_act(x, 8, weight, bias, residual=residual, return_sum=True)
    (y.sum() + s.sum()).backward()
    assert x.grad.shape == (0, 8) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_gradient_through_one_output_only(device):
    x, residual, weight, bias = (t.requires_grad_() for t in inputs((3, 8), (8,), torch.float64, device))
    y, s = ops.layer_norm_act(x, 8, weight, bias, residual=residual, return_sum=True)
    assert torch.equal(torch.autograd.grad(s.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    want = torch.autograd.grad(reference(x, (8,), weight, bias, residual=residual).square().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], want)


@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_gradcheck(device, activation):
    leaves = [t.requires_grad_() for t in inputs((3, 5), (5,), torch.float64, device)]
    code = ops.ACTIVATIONS[activation].code

    def norm(x, residual, weight, bias):
        return OPERATORS.layer_norm_act(x, residual, [5], weight, bias, 1e-5, code, 0.2)

    def add_norm(x, residual, weight, bias):
        return OPERATORS.add_layer_norm_act(x, residual, [5], weight, bias, 1e-5, code, 0.2)

    for function in (norm, add_norm):
        assert torch.autograd.gradcheck(function, leaves)


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_opcheck(device, activation):
    code = ops.ACTIVATIONS[activation].code
    for requires_grad in (False, True):
        x, residual, weight, bias = (
            t.requires_grad_(requires_grad) for t in inputs((3, 4, 8), (8,), torch.float32, device)
        )
        rest = ([8], weight, bias, 1e-5, code, 0.01)
        torch.library.opcheck(OPERATORS.layer_norm_act.default, (x, None, *rest))
        torch.library.opcheck(OPERATORS.add_layer_norm_act.default, (x, residual, *rest))
        torch.library.opcheck(OPERATORS.layer_norm_act_training.default, (x, residual, *rest))
    x, residual, weight, bias = inputs((3, 4, 8), (8,), torch.float32, device)
    rest = ([8], weight, None, 1e-5, code, 0.01)
    torch.library.opcheck(OPERATORS.layer_norm_act_inference.default, (x, None, *rest))
    torch.library.opcheck(OPERATORS.add_layer_norm_act_inference.default, (x, residual, *rest))
    mean, rstd = torch.randn(12, device=device), torch.rand(12, device=device)
    torch.library.opcheck(
        OPERATORS.layer_norm_act_backward.default, (x, residual, x, mean, rstd, weight, bias, 8, code, 0.01)
    )


def test_autocast_as_aten(device, compiled):
    x, residual, weight, bias = inputs((4, 32), (32,), torch.float32, device)
    for half in (False, True):
        given = x.bfloat16() if half else x
        with torch.autocast(device, dtype=torch.bfloat16):
            y, want = ops.layer_norm_act(given, 32, weight, bias), reference(given, (32,), weight, bias)
            summed = ops.layer_norm_act(given, 32, weight, bias, residual=residual)
        assert y.dtype == want.dtype
        torch.testing.assert_close(y, want)
        assert summed.dtype == torch.float32


def test_errors(device, compiled):
    x, residual, weight, bias = inputs((4, 8), (8,), torch.float32, device)
    for arguments, keywords, match in (
        ((x, 5), {}, "normalized_shape does not fit the last dimensions of x of shape"),
        ((x, (2, 4, 8)), {}, "normalized_shape does not fit"),
        ((x, 8, weight[:4]), {}, "weight has"),
        ((x, 8, weight.view(2, 4)), {}, r"weight has shape \(2, 4\), expected \(8,?\)"),
        ((x, 8, weight, bias.view(1, 8)), {}, r"bias has shape \(1, 8\), expected \(8,?\)"),
        ((x, 8, weight.double()), {}, "weight has another dtype than x"),
        ((x, 8, weight, bias.half()), {}, "another dtype than x"),
        ((x, 8), {"residual": residual[:2]}, "residual has shape"),
        ((x.long(), 8), {}, "expected float64, float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=match) as error:
            ops.layer_norm_act(*arguments, **keywords)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("norm", [ops.layer_norm_act, ops.rms_norm_act])
@pytest.mark.parametrize("cols", [16_384, 65_536, 3_000_000])
def test_long_rows(device, norm, cols):
    """Roundings that are all alike, as those of squares of one magnitude, do not add up."""
    x = torch.where(torch.rand(2, cols, device=device) < 0.5, 1.1, -1.1)
    grad = torch.randn(2, cols, device=device)
    results = []
    for wide in (x, x.double()):
        leaf = wide.requires_grad_()
        y = norm(leaf, cols)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, grad.to(y.dtype))))
    for got, exact in zip(*results, strict=True):
        assert (got - exact).abs().max() <= 3e-7 * exact.abs().max()


@pytest.mark.cuda
@pytest.mark.gpu_memory(30)
def test_more_than_2_31_elements():
    rows = 2**31 // 4096 + 5
    x = torch.randn(3, 4096, device="cuda", dtype=torch.float16).repeat(rows // 3 + 1, 1)[:rows]
    y = ops.layer_norm_act(x, 4096)
    torch.testing.assert_close(y[-3:], reference(x[-3:], (4096,)))


REPEATED = [((2, 3, 8), (3, 8)), ((2, 3, 8), (1, 3, 8)), ((2, 3, 8), (1, 1, 8)), ((4, 5, 1, 8), (1, 8)), ((3, 8), (8,))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, residual_shape", REPEATED)
def test_a_residual_that_repeats(device, shape, residual_shape, dtype):
    x, residual = torch.randn(shape, device=device).to(dtype), torch.randn(residual_shape, device=device).to(dtype)
    weight, bias = (torch.randn(8, device=device).to(dtype) for _ in range(2))
    check_operator(ops.layer_norm_act, reference, x, (8,), weight, bias, residual=residual, return_sum=True)
    check_operator(ops.layer_norm_act, reference, x, (8,), weight, None, activation="gelu", residual=residual)


@pytest.mark.parametrize("shape, residual_shape", REPEATED)
def test_gradients_of_a_residual_that_repeats(device, shape, residual_shape):
    x, residual = (
        torch.randn(size, device=device, dtype=torch.float64, requires_grad=True) for size in (shape, residual_shape)
    )
    assert torch.autograd.gradcheck(
        lambda x, r: ops.layer_norm_act(x, (8,), residual=r, activation="silu", return_sum=True), (x, residual)
    )


@pytest.mark.parametrize("residual_shape", [(2, 3, 1), (2, 1, 8), (1, 2, 3, 8), (4, 8), (1,)])
def test_a_residual_that_does_not_fit(device, compiled, residual_shape):
    x, residual = torch.randn(2, 3, 8, device=device), torch.randn(residual_shape, device=device)
    with pytest.raises(RuntimeError, match="residual has shape"):
        ops.layer_norm_act(x, (8,), residual=residual)
