"""cross_entropy against torch's own: accuracy, ignored rows, smoothing, gradients, errors."""

import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator
from support.accuracy import assert_as_accurate
from support.selection import pairwise

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.ops.registration import has_kernels

OPERATORS = torch.ops.kfconvert
SHAPES = [(1, 1), (5, 7), (33, 128), (8, 1000), (6, 4097), (4, 32_000), (300, 16), (0, 8)]
OPTIONS = [{}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"ignore_index": 2}]


def inputs(shape, dtype, device):
    rows, classes = shape
    target = torch.randint(classes, (rows,), device=device)
    target[: rows // 3] = -100
    return torch.randn(shape, device=device).mul(3).to(dtype), target


@pairwise(options=OPTIONS, dtype=DTYPES, shape=SHAPES)
def test_as_accurate_as_aten(device, shape, dtype, options):
    x, target = inputs(shape, dtype, device)
    if "ignore_index" in options:
        target = target.clamp(min=0)
    if "label_smoothing" in options and dtype == torch.float16:
        # ATen adds the logits up in float16, which overflows.
        exact = reference.cross_entropy(x.double(), target, **options)
        assert_as_accurate(ops.cross_entropy(x, target, **options), exact.to(dtype), exact)
    else:
        check_operator(ops.cross_entropy, reference.cross_entropy, x, target, **options)


@pairwise(options=OPTIONS, dtype=DTYPES, shape=[(9, 40), (6, 1001), (3, 5000)])
def test_gradients(device, shape, dtype, options):
    x, target = inputs(shape, dtype, device)
    if "ignore_index" in options:
        target = target.clamp(min=0)
    weights = [torch.randn(shape[0], device=device).to(dtype) if "none" in options.values() else torch.ones(())]

    def of(function):
        return lambda x: function(x, target, **options)

    weights = [w.to(device) for w in weights]
    check_gradients(of(ops.cross_entropy), of(reference.cross_entropy), [x], weights)


def test_gradcheck(device):
    x, target = inputs((6, 5), torch.float64, device)
    for options in (*OPTIONS[:4], {"reduction": "none", "label_smoothing": 0.3}):
        assert torch.autograd.gradcheck(lambda x: ops.cross_entropy(x, target, **options), x.requires_grad_())


def test_no_row_counts(device, compiled):
    x, target = inputs((3, 5), torch.float32, device)
    assert ops.cross_entropy(x, torch.full_like(target, -100)).isnan()
    assert ops.cross_entropy(x, torch.full_like(target, -100), reduction="sum") == 0


def test_special_values(device):
    inf = float("inf")
    x = torch.randn(4, 10, device=device)
    x[0, 2], x[1, :], x[2, 3], x[3, :9] = inf, -inf, float("nan"), -inf
    target = torch.tensor([0, 1, 2, 9], device=device)
    want = reference.cross_entropy(x, target, reduction="none")
    torch.testing.assert_close(ops.cross_entropy(x, target, reduction="none"), want, equal_nan=True)


@pytest.mark.parametrize("classes", [10, 4096, 70_001])
def test_an_ignored_row_has_no_gradient_whatever_is_in_it(device, classes):
    x, target = inputs((3, classes), torch.float32, device)
    x[1, 2:5] = torch.tensor([float("inf"), -float("inf"), float("nan")], device=device)
    target[1] = -100
    x.requires_grad_()
    loss = ops.cross_entropy(x, target)
    loss.backward()
    assert loss.isfinite() and torch.equal(x.grad[1], torch.zeros_like(x[1]))
    rest = x.detach()[::2].requires_grad_()
    reference.cross_entropy(rest, target[::2]).backward()
    torch.testing.assert_close(x.grad[::2], rest.grad)


def test_any_strides(device):
    x, target = inputs((12, 30), torch.float32, device)
    for view in (x[:, ::2], x[:, 1:9], torch.randn(30, 12, device=device).t()):
        check_operator(ops.cross_entropy, reference.cross_entropy, view, target % view.shape[1])


def test_opcheck(device):
    x, target = inputs((6, 8), torch.float32, device)
    for requires_grad in (False, True):
        leaf = x.clone().requires_grad_(requires_grad)
        for reduction in (0, 1, 2):
            torch.library.opcheck(OPERATORS.cross_entropy.default, (leaf, target, -100, 0.1, reduction))
    for reduction in (0, 1):
        loss, lse, weight = OPERATORS.cross_entropy(x, target, -100, 0.1, reduction)
        arguments = (loss, x, target, lse, weight, -100, 0.1)
        torch.library.opcheck(OPERATORS.cross_entropy_backward.default, arguments)


def test_autocast_and_compile(device, compiled):
    x, target = inputs((6, 8), torch.bfloat16, device)
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = (package.cross_entropy(x, target) for package in (ops, reference))
        assert got.dtype is want.dtype is torch.float32
    # ATen's own result, which the composition is, is rounded to bfloat16 on CUDA in some versions.
    exact = reference.cross_entropy(x.float(), target) if has_kernels(x) else want
    torch.testing.assert_close(got, exact)
    module = torch.compile(ops.cross_entropy, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(module(x.float(), target), reference.cross_entropy(x.float(), target))


def test_errors(device, compiled):
    x, target = inputs((4, 8), torch.float32, device)
    for arguments, match in (
        ((x[0], target), r"x has shape \(8,?\), expected \(rows, classes\)"),
        ((x, target[:3]), r"target has shape \(3,?\), expected \(4,?\)"),
        ((x, target.int()), "target must be int64"),
        ((x.int(), target), "expected float64, float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=match):
            ops.cross_entropy(*arguments)
    with pytest.raises(ValueError, match="reduction must be none, sum or mean, got 'max'"):
        ops.cross_entropy(x, target, reduction="max")
    with pytest.raises(ValueError, match="label_smoothing must be between 0 and 1, got 2"):
        ops.cross_entropy(x, target, label_smoothing=2)


def test_a_target_that_is_no_class():
    x, target = inputs((4, 8), torch.float32, "cpu")
    target[1] = 8
    with pytest.raises(RuntimeError, match="target holds . to 8, x has 8 classes"):
        ops.cross_entropy(x, target)


@pytest.mark.parametrize("wrong", [8, -5, 10**12])
def test_a_target_that_is_no_class_in_a_compiled_graph(wrong):
    """The kernel itself refuses it: there is no Python between the graph and it."""
    x, target = inputs((4, 8), torch.float32, "cpu")
    if not has_kernels(x):
        pytest.skip("no compiled library")
    good, target = target.clone(), target.index_fill(0, torch.tensor(1), wrong)
    match = rf"kfconvert::cross_entropy: target holds .* {max(wrong, int(target.max()))}, x has 8 classes"
    run = torch.compile(lambda x, target: ops.cross_entropy(x, target), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(run(x, good), reference.cross_entropy(x, good))
    for call in (run, lambda x, target: OPERATORS.cross_entropy(x, target, -100, 0.0, 1)):
        with pytest.raises(RuntimeError, match=match):
            call(x, target)
    loss, lse, weight = OPERATORS.cross_entropy(x, good, -100, 0.0, 1)
    with pytest.raises(RuntimeError, match=match):
        OPERATORS.cross_entropy_backward(loss, x, target, lse, weight, -100, 0.0)
    assert OPERATORS.cross_entropy(x[1:], target[1:], wrong, 0.0, 1)[0].isfinite()  # ignored


@pytest.mark.cuda
def test_a_target_that_is_no_class_makes_the_loss_nan():
    x, target = inputs((4, 8), torch.float32, "cuda")
    target[1] = 8
    x.requires_grad_()
    loss = ops.cross_entropy(x, target)
    loss.backward()
    assert loss.isnan() and x.grad[1].isnan().all()
