"""The functions of two tensors against plain ATen: broadcasting, layouts, special values, gradients, errors."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES, check_gradients, check_operator
from support.selection import each_once, pairwise

from kfconvert import ops
from kfconvert.kernels import reference

OPERATORS = torch.ops.kfconvert
COMBINED = ["add_relu", "multiply_relu", "add_sigmoid", "mul_tanh", "add_mul_exp"]
REFERENCES = {name: getattr(reference, name) for name in (*COMBINED, "swish_multiply", "geglu", "mish_scale")}
# Pairs of shapes that broadcast.
SHAPES = [
    ((5, 7, 40), (5, 7, 40)),
    ((5, 7, 40), (40,)),
    ((40,), (5, 7, 40)),
    ((6, 1), (1, 33)),
    ((2, 8, 4, 6), (8, 1, 1)),
    ((2, 8, 4, 6), (2, 8, 1, 1)),
    ((2, 1, 4, 1), (8, 1, 6)),
    ((2, 3, 2, 3, 2, 3, 2), (2, 1, 2, 1, 2, 1, 2)),
    ((17,), ()),
    ((), ()),
    ((3, 70_001), (3, 1)),
    ((0, 8), (8,)),
    ((4, 1), (4, 0)),
]


def inputs(shapes, dtype, device):
    return [torch.randn(shape, device=device).mul(1.5).to(dtype) for shape in shapes]


def laid_out(x, layout):
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    if layout == "strided":
        return x.repeat_interleave(2, -1)[..., ::2]
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if layout == "transposed" else x


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("name", REFERENCES)
def test_shapes(device, name, shapes):
    check_operator(getattr(ops, name), REFERENCES[name], *inputs(shapes, torch.float32, device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REFERENCES)
def test_as_accurate_as_aten(device, name, dtype):
    for shapes in (SHAPES[0], SHAPES[1], SHAPES[5]):
        check_operator(getattr(ops, name), REFERENCES[name], *inputs(shapes, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "layouts",
    [
        ("plain", "channels_last"),
        ("channels_last", "plain"),
        ("channels_last", "channels_last"),
        ("strided", "plain"),
        ("transposed", "strided"),
        ("transposed", "transposed"),
    ],
)
@pytest.mark.parametrize("name", ["add_relu", "mul_tanh", "mish_scale"])
def test_layouts(device, name, layouts, dtype):
    function = getattr(ops, name)
    for shapes in (((2, 8, 6, 10), (2, 8, 6, 10)), ((2, 8, 6, 10), (2, 8, 1, 1)), ((1, 8, 6, 1), (2, 8, 6, 10))):
        x, y = (laid_out(x, layout) for x, layout in zip(inputs(shapes, dtype, device), layouts))
        result = check_operator(function, REFERENCES[name], x, y)
        full = x if x.shape == result.shape else y
        assert result.stride() == torch.empty_like(full).stride()


def test_misaligned_pointers(device):
    x, y = (torch.randn(8 * 64 + 1, device=device).half()[1:].view(8, 64) for _ in "xy")
    check_operator(ops.add_relu, REFERENCES["add_relu"], x, y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REFERENCES)
def test_special_values_as_aten_in_float64(device, name, dtype):
    special = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 2.0, -2.0, 60000.0, -60000.0, 1e-30]
    x, y = torch.cartesian_prod(*[torch.tensor(special, device=device, dtype=dtype)] * 2).t().contiguous()
    got = getattr(ops, name)(x, y)
    want = REFERENCES[name](x.double(), y.double()).to(dtype)
    torch.testing.assert_close(got, want, equal_nan=True)


@pairwise(shapes=[((3, 8, 6), (3, 8, 6)), ((3, 8, 6), (6,)), ((3, 1, 6), (8, 1))], dtype=DTYPES, name=REFERENCES)
def test_gradients(device, name, dtype, shapes):
    weights = [torch.randn(3, 8, 6, device=device).to(dtype)]
    tensors = inputs(shapes, dtype, device)
    check_gradients(getattr(ops, name), REFERENCES[name], tensors, weights)


@pytest.mark.parametrize("name", REFERENCES)
def test_gradcheck(device, name):
    leaves = [x.requires_grad_() for x in inputs(((2, 3, 4), (3, 1)), torch.float64, device)]
    assert torch.autograd.gradcheck(getattr(ops, name), leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["plain", "channels_last", "strided", "transposed"])
def test_gradient_of_add_mul_exp(device, layout, dtype):
    """From the output, in its layout."""
    x, y = (laid_out(t, layout).requires_grad_() for t in inputs([(2, 8, 6, 10)] * 2, dtype, device))
    result = ops.add_mul_exp(x, y)
    for grad in (torch.randn(result.shape, device=device).to(dtype), torch.ones_like(result[:1, :1]).expand_as(result)):
        for got in torch.autograd.grad(result, (x, y), grad, retain_graph=True):
            torch.testing.assert_close(got, 2 * grad * result)


def test_gradients_of_gradients(device):
    leaves = [x.requires_grad_() for x in inputs(((2, 3, 4), (3, 1)), torch.float64, device)]
    for name in ("add_mul_exp", "add_sigmoid", "mul_tanh", "mish_scale"):
        assert torch.autograd.gradgradcheck(getattr(ops, name), leaves)


def test_gradient_of_one_argument(device):
    x, y = inputs(((3, 8), (8,)), torch.float64, device)
    for name in REFERENCES:
        for wanted, fixed in ((x, y), (y, x)):
            wanted.requires_grad_(), fixed.requires_grad_(False)
            want = torch.autograd.grad(REFERENCES[name](x, y).sum(), wanted)
            torch.testing.assert_close(torch.autograd.grad(getattr(ops, name)(x, y).sum(), wanted), want)


@each_once(combination=[0, 1, 2], code=[0, 1, 5, 12, 13])
def test_opcheck(device, combination, code):
    image = torch.randn(2, 4, 3, 5, device=device).contiguous(memory_format=torch.channels_last)
    scale = torch.randn(4, 1, 1, device=device)
    for x, other in (inputs(((2, 3, 8), (2, 3, 8)), torch.float32, device), (image, scale)):
        for requires_grad in (False, True):
            tensors = [t.clone().requires_grad_(requires_grad) for t in (x, other)]
            torch.library.opcheck(OPERATORS.combine_act.default, (*tensors, combination, code, 0.01))
        torch.library.opcheck(OPERATORS.combine_act_inference.default, (x, other, combination, code, 0.01))
        grad = torch.randn(torch.broadcast_shapes(x.shape, other.shape), device=device)
        arguments = (grad, x, other, combination, code, 0.01)
        if combination:
            torch.library.opcheck(OPERATORS.combine_act_backward.default, arguments)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_autocast(device, compiled, requires_grad):
    x, y = (t.requires_grad_(requires_grad) for t in inputs(((4, 16), (16,)), torch.float32, device))
    with torch.autocast(device, dtype=torch.bfloat16):
        for pair in ((x, y), (x.bfloat16(), y.bfloat16()), (x.bfloat16(), y)):
            got, want = ops.add_relu(*pair), F.relu(pair[0] + pair[1])
            assert got.dtype == want.dtype
            torch.testing.assert_close(got, want)


def test_compile(device):
    compiled = torch.compile(lambda x, y: ops.mul_tanh(x, y) + 1, backend="aot_eager")
    for batch in (2, 3):
        x, y = inputs(((batch, 8), (8,)), torch.float32, device)
        torch.testing.assert_close(compiled(x, y), torch.tanh(x * y) + 1)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "message"),
    [
        (((3, 4), (3,)), (torch.float32, torch.float32), r"shapes \(3, 4\) and \(3,?\) do not broadcast"),
        (((3,), (3,)), (torch.float32, torch.float64), "other has another dtype than x"),
        (((3,), (3,)), (torch.int64, torch.int64), "expected float64, float32, float16 or bfloat16"),
    ],
)
def test_errors(device, compiled, shapes, dtypes, message):
    x, y = (torch.ones(shape, device=device, dtype=dtype) for shape, dtype in zip(shapes, dtypes))
    with pytest.raises(RuntimeError, match=message):
        ops.add_relu(x, y)


@pytest.mark.cuda
def test_two_devices():
    with pytest.raises(RuntimeError, match="another device"):
        ops.add_relu(torch.ones(3), torch.ones(3, device="cuda"))


@pytest.mark.cuda
@pytest.mark.gpu_memory(30)
def test_more_elements_than_32_bits_count():
    rows = 2**31 // 4096 + 3
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.float16)
    y = torch.randn(rows, 4096, device="cuda", dtype=torch.float16)
    for other in (y, y[0], y[:, :1]):
        result = ops.multiply_relu(x, other)
        for part in (slice(0, 2), slice(rows // 2, rows // 2 + 2), slice(rows - 2, rows)):
            want = F.relu(x[part].float() * (other[part] if other.dim() == 2 else other).float()).half()
            assert torch.equal(result[part], want)
        del result


def test_biases(device):
    image, bias = torch.randn(2, 8, 4, 6, device=device), torch.randn(8, device=device)
    rows = torch.randn(5, 8, device=device)
    for name, function in (("relu", F.relu), ("gelu", F.gelu), ("silu", F.silu)):
        operator, definition = (getattr(package, f"bias_{name}") for package in (ops, reference))
        torch.testing.assert_close(definition(rows, bias), function(rows + bias))
        torch.testing.assert_close(definition(image, bias, dim=1), function(image + bias[:, None, None]))
        check_operator(operator, definition, rows, bias)
        check_operator(operator, definition, image, bias, dim=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mish_scale_by_a_number(device, dtype):
    for x in (torch.randn(5, 70, device=device).to(dtype), torch.randn(2, 3, 4, device=device).to(dtype).mT):
        for scale in (0.5, 0.1, 3, -2.7):
            check_operator(ops.mish_scale, reference.mish_scale, x, scale)
            check_gradients(
                lambda x: ops.mish_scale(x, scale),
                lambda x: reference.mish_scale(x, scale),
                [x],
                [torch.randn_like(x)],
            )


def test_other_names():
    assert ops.elementwise_add_relu is ops.add_relu and ops.elementwise_mul_tanh is ops.mul_tanh
    assert ops.fused_bias_gelu is ops.bias_gelu
