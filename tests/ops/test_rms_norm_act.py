import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator, gradients
from support.selection import each_once, pairwise

from kfconvert import ops
from kfconvert.ops.fused.rms_norm_act import reference

OPERATORS = torch.ops.kfconvert


def inputs(shape, normalized, dtype, device, weight_dtype=None):
    x, residual, weight = torch.randn(shape) * 2 + 0.5, torch.randn(shape), torch.rand(normalized) + 0.5
    x, residual = (t.to(device, dtype) for t in (x, residual))
    return x, residual, weight.to(device, weight_dtype or dtype)


def test_the_reference_is_aten(device):
    x, _, weight = inputs((4, 5, 6), (5, 6), torch.float64, device)
    for w in (weight, None):
        torch.testing.assert_close(reference(x, (5, 6), w, 1e-3), torch.nn.functional.rms_norm(x, (5, 6), w, 1e-3))
    torch.testing.assert_close(reference(x, (5, 6), weight, offset=1.0), reference(x, (5, 6), weight + 1))


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_as_accurate_as_aten(device, dtype, activation):
    x, residual, weight = inputs((6, 5, 96), (96,), dtype, device)
    options = {"activation": activation, "negative_slope": 0.2}
    for w, offset in ((weight, 0.0), (weight, 1.0), (None, 1.0)):
        for r in (None, residual):
            check_operator(ops.rms_norm_act, reference, x, (96,), w, residual=r, offset=offset, **options)


# Every row length of the CUDA launch table, and the lengths around them that fall back to single elements.
LENGTHS = [
    *(1, 2, 7, 8, 31, 64, 65, 128, 129, 256, 384, 512, 768, 1000, 1024, 1025, 2048, 3072, 4096, 8192, 10000),
    40000,
]


@pytest.mark.parametrize("cols", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_row_lengths(device, cols, dtype):
    x, residual, weight = inputs((5, cols), (cols,), dtype, device)
    for r, offset in ((None, 0.0), (residual, 1.0)):
        y, s = check_operator(ops.rms_norm_act, reference, x, cols, weight, residual=r, return_sum=True, offset=offset)
        assert s is x if r is None else torch.equal(s, x + r)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 130, 4097])
def test_row_counts(device, rows):
    x, residual, weight = inputs((rows, 64), (64,), torch.float32, device)
    check_operator(ops.rms_norm_act, reference, x, (64,), weight, residual=residual, activation="relu", return_sum=True)


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (0, 3, 4, 5), (2, 3, 0, 5)])
def test_several_normalized_dimensions(device, shape):
    for inner in (1, 2, 3):
        x, residual, weight = inputs(shape, shape[-inner:], torch.float32, device)
        check_operator(ops.rms_norm_act, reference, x, shape[-inner:], weight, residual=residual)


def test_any_strides(device):
    x, residual, weight = inputs((4, 6, 16), (16,), torch.float32, device)
    permuted = residual.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    for view, r in ((x.transpose(0, 1), residual.transpose(0, 1)), (x, permuted), (x[:, ::2], residual[:, ::2])):
        check_operator(ops.rms_norm_act, reference, view, (16,), weight.repeat(2)[::2], residual=r)
    image = torch.randn(2, 16, 3, 3, device=device).permute(0, 2, 3, 1)
    check_operator(ops.rms_norm_act, reference, image, (16,), weight)


def test_misaligned_pointer(device):
    x = torch.randn(8 * 64 + 1, device=device).half()[1:].view(8, 64)
    weight = torch.randn(65, device=device).half()[1:]
    check_operator(ops.rms_norm_act, reference, x, (64,), weight)


def test_a_mean_is_not_subtracted(device):
    x = torch.randn(8, 256, device=device) + 1000
    check_operator(ops.rms_norm_act, reference, x, (256,))
    constant = torch.full((2, 64), 3.0, device=device)
    torch.testing.assert_close(ops.rms_norm_act(constant, 64), torch.ones_like(constant))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nan_and_infinity(device, dtype):
    x = torch.randn(5, 32, device=device).to(dtype)
    x[0, 3], x[1, 4], x[2, 5], x[3] = float("nan"), float("inf"), -float("inf"), 0
    for activation in ("none", "relu", "gelu", "silu"):
        for eps in (1e-6, 0.0):  # with 0, a row of zeros is one of NaN
            got, want = (f(x, 32, eps=eps, activation=activation) for f in (ops.rms_norm_act, reference))
            assert torch.equal(got.isnan(), want.isnan())


@pairwise(columns=[7, 96, 1001, 4096, 9000], offset=[0.0, 1.0], dtype=[torch.float16, torch.bfloat16])
def test_a_float32_weight_beside_a_half_type(device, dtype, offset, columns):
    x, residual, weight = inputs((4, columns), (columns,), dtype, device, weight_dtype=torch.float32)
    for r in (None, residual):
        check_operator(ops.rms_norm_act, reference, x, (columns,), weight, residual=r, offset=offset)
    operator, aten = (
        lambda x, weight, f=f: f(x, (columns,), weight, activation="silu", offset=offset)
        for f in (ops.rms_norm_act, reference)
    )
    grad = torch.randn_like(x)
    assert [g.dtype for g in gradients(operator, (x, weight), (grad,))] == [dtype, torch.float32]
    check_gradients(operator, aten, (x, weight), (grad,))


@each_once(activation=ops.ACTIVATIONS, dtype=DTYPES)
def test_gradients(device, activation, dtype):
    x, residual, weight = inputs((6, 5, 96), (96,), dtype, device)
    weights = [torch.randn(x.shape, device=device).to(dtype) for _ in range(2)]
    options = {"activation": activation, "return_sum": True, "offset": 1.0, "negative_slope": 0.2}

    def run(function):
        return lambda x, r, w: function(x, (96,), w, residual=r, **options)

    check_gradients(run(ops.rms_norm_act), run(reference), [x, residual, weight], weights, activation=activation)


@pytest.mark.parametrize("cols", [1, 7, 64, 100, 257, 512, 768, 1024, 2048, 4096, 8192, 9000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_row_lengths(device, cols, dtype):
    x, _, weight = inputs((37, cols), (cols,), dtype, device)
    weights = [torch.randn(x.shape, device=device).to(dtype)]

    def run(function):
        return lambda x, w: function(x, (cols,), w)

    check_gradients(run(ops.rms_norm_act), run(reference), [x, weight], weights)


def test_gradients_are_the_same_at_every_call(device):
    x, _, weight = inputs((3000, 256), (256,), torch.float32, device)
    leaves = [t.requires_grad_() for t in (x, weight)]
    first, second = (torch.autograd.grad(ops.rms_norm_act(x, 256, weight).square().sum(), leaves) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_gradients_of_empty_inputs(device):
    x, residual, weight = (t.requires_grad_() for t in inputs((0, 8), (8,), torch.float32, device))
    y, s = ops.rms_norm_act(x, 8, weight, residual=residual, return_sum=True)
    (y.sum() + s.sum()).backward()
    assert x.grad.shape == (0, 8) and torch.equal(weight.grad, torch.zeros_like(weight))


def test_gradient_through_one_output_only(device):
    x, residual, weight = (t.requires_grad_() for t in inputs((3, 8), (8,), torch.float64, device))
    y, s = ops.rms_norm_act(x, 8, weight, residual=residual, return_sum=True)
    assert torch.equal(torch.autograd.grad(s.sum(), x, retain_graph=True)[0], torch.ones_like(x))
    want = torch.autograd.grad(reference(x, (8,), weight, residual=residual).square().sum(), x)[0]
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], want)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("activation", ops.ACTIVATIONS)
def test_gradcheck(device, activation, offset):
    x, residual, weight = (t.requires_grad_() for t in inputs((3, 5), (5,), torch.float64, device))
    code = ops.ACTIVATIONS[activation].code

    def norm(x, residual, weight):
        return OPERATORS.rms_norm_act(x, residual, [5], weight, 1e-5, code, 0.2, offset)

    def add_norm(x, residual, weight):
        return OPERATORS.add_rms_norm_act(x, residual, [5], weight, 1e-5, code, 0.2, offset)

    for function in (norm, add_norm):
        assert torch.autograd.gradcheck(function, (x, residual, weight))
        assert torch.autograd.gradcheck(lambda x, r, f=function: f(x, r, None), (x, residual))


@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_opcheck(device, activation):
    code = ops.ACTIVATIONS[activation].code
    for requires_grad in (False, True):
        x, residual, weight = (t.requires_grad_(requires_grad) for t in inputs((3, 4, 8), (8,), torch.float32, device))
        rest = ([8], weight, 1e-5, code, 0.01, 1.0)
        torch.library.opcheck(OPERATORS.rms_norm_act.default, (x, None, *rest))
        torch.library.opcheck(OPERATORS.add_rms_norm_act.default, (x, residual, *rest))
        torch.library.opcheck(OPERATORS.rms_norm_act_training.default, (x, residual, *rest))
    x, residual, weight = inputs((3, 4, 8), (8,), torch.float32, device)
    rest = ([8], None, 1e-5, code, 0.01, 0.0)
    torch.library.opcheck(OPERATORS.rms_norm_act_inference.default, (x, None, *rest))
    torch.library.opcheck(OPERATORS.add_rms_norm_act_inference.default, (x, residual, *rest))
    rstd = torch.rand(12, device=device)
    torch.library.opcheck(OPERATORS.rms_norm_act_backward.default, (x, residual, x, rstd, weight, 8, code, 0.01, 1.0))


def test_autocast(device, compiled):
    x, residual, weight = inputs((4, 32), (32,), torch.float32, device)
    for given in (x, x.bfloat16()):
        with torch.autocast(device, dtype=torch.bfloat16):
            y = ops.rms_norm_act(given, 32, weight)
            want = torch.nn.functional.rms_norm(given, (32,), weight, 1e-6)
            summed = ops.rms_norm_act(given, 32, weight, residual=residual)
        assert summed.dtype == torch.float32
        # Which of them F.rms_norm returns depends on the device and the version of torch.
        assert y.dtype in (torch.float32, given.dtype)
        torch.testing.assert_close(y.float(), want.float(), atol=0.02, rtol=0.02)


def test_errors(device, compiled):
    x, residual, weight = inputs((4, 8), (8,), torch.float32, device)
    for arguments, keywords, match in (
        ((x, 5), {}, "rms_norm_act: normalized_shape does not fit the last dimensions of x of shape"),
        ((x, 8, weight[:4]), {}, "weight has"),
        ((x, 8, weight.double()), {}, "weight has another dtype than x"),
        ((x, 8), {"residual": residual[:2]}, "residual has shape"),
        ((x.long(), 8), {}, "expected float64, float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=match) as error:
            ops.rms_norm_act(*arguments, **keywords)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="unknown activation 'mish'"):
        ops.rms_norm_act(x, 8, activation="mish")


@pytest.mark.cuda
@pytest.mark.gpu_memory(30)
def test_more_than_2_31_elements():
    rows = 2**31 // 4096 + 5
    x = torch.randn(3, 4096, device="cuda", dtype=torch.float16).repeat(rows // 3 + 1, 1)[:rows]
    torch.testing.assert_close(ops.rms_norm_act(x, 4096)[-3:], reference(x[-3:], (4096,)))


REPEATED = [((2, 3, 8), (3, 8)), ((2, 3, 8), (1, 1, 8)), ((4, 5, 1, 8), (1, 8)), ((3, 8), (8,))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, residual_shape", REPEATED)
def test_a_residual_that_repeats(device, shape, residual_shape, dtype):
    x, residual, weight = (torch.randn(size, device=device).to(dtype) for size in (shape, residual_shape, (8,)))
    check_operator(ops.rms_norm_act, reference, x, (8,), weight, residual=residual, return_sum=True)


@pytest.mark.parametrize("shape, residual_shape", REPEATED)
def test_gradients_of_a_residual_that_repeats(device, shape, residual_shape):
    x, residual = (
        torch.randn(size, device=device, dtype=torch.float64, requires_grad=True) for size in (shape, residual_shape)
    )
    assert torch.autograd.gradcheck(
        lambda x, r: ops.rms_norm_act(x, (8,), residual=r, activation="silu", return_sum=True), (x, residual)
    )


@pytest.mark.parametrize("residual_shape", [(2, 3, 1), (2, 1, 8), (1, 2, 3, 8), (4, 8), (1,)])
def test_a_residual_that_does_not_fit(device, compiled, residual_shape):
    x, residual = torch.randn(2, 3, 8, device=device), torch.randn(residual_shape, device=device)
    with pytest.raises(RuntimeError, match="residual has shape"):
        ops.rms_norm_act(x, (8,), residual=residual)
