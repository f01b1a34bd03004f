"""Reductions against plain ATen: dimensions, layouts, many elements, special values, gradients, errors."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, check_gradients, check_operator
from support.selection import each_once, pairwise

from kfconvert import ops
from kfconvert.kernels import reference

OPERATORS = torch.ops.kfconvert
OVER_DIMS = ["reduce_sum_squared", "reduce_mean_abs"]
# (shape, dimensions)
CASES = [
    ((), None), ((), 0), ((), -1), ((1,), 0), ((7,), None), ((1000,), 0), ((5, 7), None), ((5, 7), -1),
    ((5, 7), 0), ((300, 8), 1), ((300, 33), -1), ((70, 64), -1), ((70, 65), -1), ((9, 768), -1),
    ((9, 1024), -1), ((9, 1025), -1), ((3, 4, 5, 6), (2, 3)), ((3, 4, 5, 6), (-1, 1, 2)),
    ((3, 4, 5, 6), (0, 2)), ((3, 4, 5, 6), ()), ((4, 6), [0, 1]),
    ((3, 1, 5, 1), (1, 2)), ((1, 6, 1), (0,)), ((3, 70_001), 1), ((2, 40_000), -1), ((140_003,), None),
]  # fmt: skip


def laid_out(x, layout):
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        return x.repeat_interleave(2, -1)[..., ::2]
    if layout == "rows of more":
        return torch.cat((x, x), -1)[..., : x.shape[-1]]
    if layout == "repeated":
        return x[:, :1].expand(x.shape)
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if layout == "transposed" else x


LAYOUTS = ["plain", "channels_last", "strided", "rows of more", "repeated", "transposed"]


@pairwise(keepdim=[False, True], dtype=DTYPES, name=OVER_DIMS)
def test_as_accurate_as_aten(device, name, dtype, keepdim):
    for shape, dim in CASES:
        x = torch.randn(shape, device=device).to(dtype)
        check_operator(getattr(ops, name), getattr(reference, name), x, dim=dim, keepdim=keepdim)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mse_loss_as_accurate_as_aten(device, dtype, reduction):
    for shape in ((), (7,), (5, 7), (9, 1025), (140_003,)):
        x, y = (torch.randn(shape, device=device).to(dtype) for _ in "xy")
        check_operator(ops.mse_loss, reference.mse_loss, x, y, reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device, layout, dtype):
    x = laid_out(torch.randn(2, 8, 6, 10, device=device).to(dtype), layout)
    for name in OVER_DIMS:
        for dim in (None, 0, 1, 2, 3, (2, 3), (0, 1), (1, 3), (0, 2, 3), (1, 2, 3)):
            for keepdim in (False, True):
                check_operator(getattr(ops, name), getattr(reference, name), x, dim=dim, keepdim=keepdim)
    for other in LAYOUTS:
        y = laid_out(torch.randn(2, 8, 6, 10, device=device).to(dtype), other)
        check_operator(ops.mse_loss, reference.mse_loss, x, y)


def test_misaligned_pointers(device):
    x, y = (torch.randn(8 * 4096 + 1, device=device).half()[1:].view(8, 4096) for _ in "xy")
    for dim in (None, 1):
        check_operator(ops.reduce_sum_squared, reference.reduce_sum_squared, x, dim=dim)
    check_operator(ops.mse_loss, reference.mse_loss, x, y)


@pytest.mark.parametrize("shapes", [((5, 7), (7,)), ((5, 1), (1, 7)), ((5, 7), ()), ((0, 7), (7,)), ((3,), (2, 3))])
def test_mse_loss_broadcasts(device, shapes, recwarn):
    x, y = (torch.randn(shape, device=device) for shape in shapes)
    for reduction in ("mean", "sum", "none"):
        check_operator(ops.mse_loss, reference.mse_loss, x, y, reduction=reduction)
    assert not recwarn.list


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_elements(device, dtype):
    """50 M with few distinct values: what rounding does is the same again and again, and does not cancel."""
    x = torch.tensor([0.01, 0.013, 0.7, -0.3], device=device).to(dtype).repeat(12_500_001)
    mean = ops.reduce_mean_abs(x)
    want = x[:4].double().abs().mean()
    ulp = torch.finfo(dtype).eps
    torch.testing.assert_close(mean.double(), want, rtol=max(1e-6, ulp), atol=0)
    loss = ops.mse_loss(x, torch.full_like(x, 0.25))
    want = (x[:4].double() - 0.25).square().mean()
    torch.testing.assert_close(loss.double(), want, rtol=max(1e-6, ulp), atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values(device, dtype):
    nan, inf = float("nan"), float("inf")
    rows = [[nan, 1.0], [inf, 1.0], [-inf, 1.0], [inf, nan], [inf, -inf], [0.0, -0.0], [60000.0, 60000.0]]
    x = torch.tensor(rows, device=device, dtype=dtype)
    for columns in (2, 1024):
        wide = F.pad(x, (0, columns - 2))
        for name in OVER_DIMS:
            got, want = (getattr(package, name)(wide, -1) for package in (ops, reference))
            torch.testing.assert_close(got[:6], want[:6], equal_nan=True)
        assert ops.reduce_mean_abs(wide, -1)[6].isfinite()
    for other in (x, torch.zeros_like(x)):
        want = reference.mse_loss(x[:6], other[:6])
        torch.testing.assert_close(ops.mse_loss(x[:6], other[:6]), want, equal_nan=True)


def test_half_types_do_not_overflow_on_the_way(device):
    x = torch.full((4, 4096), 300.0, device=device, dtype=torch.float16)
    assert torch.equal(ops.reduce_mean_abs(x, -1), x[:, 0])
    assert ops.mse_loss(x, x - 250.0) == 62500.0


@pytest.mark.parametrize(("shape", "dim"), [
    ((0,), None), ((0, 8), -1), ((8, 0), -1), ((8, 0), 0), ((3, 0, 4), (1, 2)), ((0, 3), None),
    ((3, 0, 4), 2),
])  # fmt: skip
def test_no_elements(device, shape, dim):
    x = torch.empty(shape, device=device)
    for name in OVER_DIMS:
        for keepdim in (False, True):
            got, want = (getattr(package, name)(x, dim, keepdim) for package in (ops, reference))
            torch.testing.assert_close(got, want, equal_nan=True)
    assert ops.mse_loss(x, x).isnan() and ops.mse_loss(x, x, "sum") == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OVER_DIMS)
def test_gradients(device, name, dtype):
    x = torch.randn(4, 6, 8, device=device).to(dtype)
    x[0, 0] = 0
    for dim in (None, -1, (1, 2), 0, (0, 2)):
        for keepdim in (False, True):
            arguments = {"dim": dim, "keepdim": keepdim}
            functions = [
                lambda x, of=getattr(package, name): of(x, **arguments)  # noqa: B023
                for package in (ops, reference)
            ]
            weights = [torch.randn(functions[1](x).shape, device=device).to(dtype)]
            check_gradients(*functions, [x], weights)


@pairwise(reduction=["mean", "sum", "none"], shapes=[((6, 8), (6, 8)), ((6, 8), (8,)), ((6, 1), (8,))], dtype=DTYPES)
def test_gradients_of_mse_loss(device, dtype, shapes, reduction):
    tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
    functions = [lambda x, y, of=package.mse_loss: of(x, y, reduction) for package in (ops, reference)]
    weights = [torch.randn(functions[1](*tensors).shape, device=device).to(dtype)]
    check_gradients(*functions, tensors, weights)


def test_gradient_of_one_argument(device):
    x, y = (torch.randn(3, 8, device=device, dtype=torch.float64) for _ in "xy")
    for wanted, fixed in ((x, y), (y, x)):
        wanted.requires_grad_(), fixed.requires_grad_(False)
        want = torch.autograd.grad(F.mse_loss(x, y), wanted)
        torch.testing.assert_close(torch.autograd.grad(ops.mse_loss(x, y), wanted), want)


@pytest.mark.parametrize("of", [int, np.int64, torch.tensor])
def test_dimensions_as_any_integers(device, compiled, of):
    x = torch.randn(4, 6, 8, device=device)
    for name in OVER_DIMS:
        operator, definition = (getattr(package, name) for package in (ops, reference))
        for dim in (0, 1, -1):
            torch.testing.assert_close(operator(x, of(dim)), definition(x, dim))
        torch.testing.assert_close(operator(x, (of(0), of(-1))), definition(x, (0, -1)))


def test_gradients_of_one_element(device):
    x, y = (torch.randn((), device=device, dtype=torch.float64).requires_grad_() for _ in "xy")
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        for name in OVER_DIMS:
            assert check(getattr(ops, name), (x,))
        for reduction in ("mean", "sum"):
            assert check(lambda x, y: ops.mse_loss(x, y, reduction), (x, y))  # noqa: B023
    for other, term, mean in ((None, 1, False), (None, 2, True), (y.detach().float(), 3, True)):
        leaf = x.detach().float().requires_grad_()
        torch.library.opcheck(OPERATORS.reduce_rows.default, (leaf, other, 0, term, mean, False))


def test_gradcheck(device):
    image = torch.randn(2, 4, 3, 2, device=device, dtype=torch.float64)
    image = image.contiguous(memory_format=torch.channels_last)
    x, y = (torch.randn(3, 4, device=device, dtype=torch.float64).requires_grad_() for _ in "xy")
    image.requires_grad_()
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        for reduction in ("mean", "sum"):
            assert check(lambda x, y: ops.mse_loss(x, y, reduction), (x, y))  # noqa: B023
        for name in OVER_DIMS:
            assert check(lambda x: getattr(ops, name)(x, -1), (x,))  # noqa: B023
            assert check(lambda x: getattr(ops, name)(x, 1, True), (image,))  # noqa: B023


def operator_arguments(y):
    """(other, dims, term, mean)"""
    return (None, 1, 1, False), (None, 2, 2, True), (y, 3, 3, True), (None, 0, 1, False)


@pytest.mark.parametrize("wide", [False, True])
def test_opcheck(device, wide):
    for dtype in (torch.float32, torch.float16):
        x, y = (torch.randn(3, 4, 8, device=device).to(dtype) for _ in "xy")
        for other, dims, term, mean in operator_arguments(y):
            for requires_grad in (False, True):
                x.requires_grad_(requires_grad)
                arguments = (x, other, dims, term, mean, wide)
                torch.library.opcheck(OPERATORS.reduce_rows.default, arguments)
            x.requires_grad_(False)
            torch.library.opcheck(OPERATORS.reduce_rows_inference.default, arguments)


def test_the_composition_of_the_operator(device):
    x, y = (torch.randn(3, 4, 8, device=device).half() for _ in "xy")
    for other, dims, term, mean in operator_arguments(y):
        for wide in (False, True):
            got = OPERATORS.reduce_rows(x, other, dims, term, mean, wide)
            want = ops.standalone.reduce._compose(x, other, dims, term, mean, wide)
            torch.testing.assert_close(got, want, rtol=4e-3, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_autocast(device, compiled, requires_grad, dtype):
    x, y = (torch.randn(4, 100, device=device).to(dtype).requires_grad_(requires_grad) for _ in "xy")
    with torch.autocast(device, dtype=torch.bfloat16):
        for function, arguments in (
            ("reduce_sum_squared", (x, -1)),
            ("reduce_mean_abs", (x, -1)),
            ("mse_loss", (x, y)),
            ("mse_loss", (x, y.detach().float())),
            ("mse_loss", (x, y[0])),
        ):
            got, want = (getattr(package, function)(*arguments) for package in (ops, reference))
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want, rtol=2e-2, atol=0)
            if requires_grad:
                grads = [torch.autograd.grad(result.sum(), x)[0] for result in (got, want)]
                torch.testing.assert_close(*grads, rtol=2e-2, atol=1e-4)


def test_compile(device):
    def function(x, y):
        return ops.mse_loss(x, y) + ops.reduce_sum_squared(x, -1) + ops.reduce_mean_abs(x.transpose(0, 1), 0)

    def plain(x, y):
        return F.mse_loss(x, y) + (x * x).sum(-1) + x.abs().mean(1)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for batch in (2, 3, 4):
        x, y = (torch.randn(batch, 8, device=device) for _ in "xy")
        torch.testing.assert_close(compiled(x, y), plain(x, y))
        x.requires_grad_()
        grads = [torch.autograd.grad(f(x, y).sum(), x)[0] for f in (compiled, plain)]
        torch.testing.assert_close(*grads)


@each_once(layout=LAYOUTS[1:], dynamic=[None, True])
def test_compile_with_any_strides(device, layout, dynamic):
    def function(x, y):
        return ops.mse_loss(x, y), ops.reduce_sum_squared(x, 1), ops.reduce_mean_abs(x, (1, 2), keepdim=True)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    torch.compiler.reset()
    for shape in ((2, 3, 4, 4), (5, 3, 6, 7), (4, 8, 5, 2)):
        x = laid_out(torch.randn(shape, device=device), layout)
        torch.testing.assert_close(compiled(x, x + 1), function(x, x + 1))


def test_errors(device, compiled):
    x = torch.randn(4, 8, device=device)
    reduce_rows = OPERATORS.reduce_rows
    for error, match, call in (
        (RuntimeError, "expected float64, float32, float16 or", lambda: ops.reduce_sum_squared(x.int())),
        (RuntimeError, r"dim 2 is out of range for x of shape \(4, 8\)", lambda: ops.reduce_mean_abs(x, 2)),
        (RuntimeError, r"dim -2 is out of range for x of shape", lambda: ops.reduce_mean_abs(x[0, 0], -2)),
        (RuntimeError, r"dim \(1, -1\) names a dimension twice", lambda: ops.reduce_sum_squared(x, (1, -1))),
        (RuntimeError, "expected float64, float32, float16 or", lambda: ops.mse_loss(x.int(), x)),
        (RuntimeError, "y has another dtype than x", lambda: ops.mse_loss(x, x.double())),
        (RuntimeError, r"shapes \(4, 8\) and \(4,?\) do not broadcast", lambda: ops.mse_loss(x, x[:, 0])),
        (ValueError, "reduction must be mean, sum or none, got 'max'", lambda: ops.mse_loss(x, x, "max")),
        (RuntimeError, "cannot reduce 3 dimensions", lambda: reduce_rows(x, None, 3, 1, False, False)),
        (RuntimeError, "other belongs to differences only", lambda: reduce_rows(x, x, 1, 1, False, False)),
        (RuntimeError, "other has shape", lambda: reduce_rows(x, x[:1], 1, 3, False, False)),
    ):
        with pytest.raises(error, match=match):
            call()


def test_equal_results_for_any_number_of_threads():
    x = torch.randn(3, 200_001)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append((ops.reduce_sum_squared(x), ops.reduce_mean_abs(x, -1), ops.mse_loss(x, x + 1)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def test_equal_results_of_equal_inputs(device):
    for shape, dim in (((5_000_003,), None), ((3, 300_000), -1), ((2000, 768), -1)):
        x, y = (torch.randn(shape, device=device) for _ in "xy")
        calls = (lambda: ops.reduce_sum_squared(x, dim), lambda: ops.mse_loss(x, y))  # noqa: B023
        assert all(torch.equal(call(), call()) for call in calls)


@pytest.mark.cuda
def test_cuda_graph():
    x, y = (torch.randn(3, 300_000, device="cuda") for _ in "xy")

    def function():
        return ops.reduce_sum_squared(x), ops.reduce_mean_abs(x, -1), ops.mse_loss(x, y)

    function()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = function()
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert all(torch.equal(got, want) for got, want in zip(captured, function(), strict=True))


@pytest.mark.cuda
def test_two_devices():
    with pytest.raises(RuntimeError, match="y is on another device than x"):
        ops.mse_loss(torch.ones(3, device="cuda"), torch.ones(3))


@pytest.mark.cuda
@pytest.mark.gpu_memory(10)
def test_more_elements_than_32_bits_count():
    rows = 2**31 // 4096 + 3
    x = torch.ones(rows, 4096, device="cuda", dtype=torch.float16)
    x[-1] = 3
    assert ops.reduce_sum_squared(x, -1)[-3:].tolist() == [4096.0, 4096.0, 36864.0]
    assert ops.reduce_mean_abs(x) == 1 and ops.reduce_mean_abs(x[-2:]) == 2
    flat = x.view(1, -1)
    assert ops.reduce_mean_abs(flat, -1).item() == 1 and ops.mse_loss(x, x) == 0
    x[:-1] = 0
    with torch.autocast("cuda"):  # float32 results
        assert ops.reduce_sum_squared(flat, -1).item() == 36864.0
