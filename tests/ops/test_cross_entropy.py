"""cross_entropy against torch's own: accuracy, ignored rows, smoothing, gradients, errors."""

import subprocess
import sys

import pytest
import torch
from helpers import assert_one_graph

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.ops.registration import has_kernels

OPERATORS = torch.ops.kfconvert


def inputs(shape, dtype, device):
    rows, classes = shape
    target = torch.randint(classes, (rows,), device=device)
    target[: rows // 3] = -100
    return torch.randn(shape, device=device).mul(3).to(dtype), target


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


OPERATORS = torch.ops.kfconvert


def arguments(dtype, device, ids=(2, 5), kind=torch.int64, cols=8):
    """The arguments that NAMES names, and token_type_ids."""
    ids = torch.randint(0, 11, ids, device=device, dtype=kind)
    tables = [torch.randn(rows, cols, device=device).to(dtype) for rows in (11, 7, 2)]
    vectors = [torch.randn(cols, device=device).to(dtype) for _ in range(2)]
    return [ids, *tables, *vectors], torch.randint_like(ids, 2)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_one_graph_for_all_lengths(device, requires_grad):
    (_, *tensors), _ = arguments(torch.float32, device)
    tensors[0].requires_grad_(requires_grad)
    lengths = [torch.randint(0, 11, (3, length), device=device) for length in (4, 5, 6, 7)]
    assert_one_graph(lambda ids: ops.embedding_layer_norm(ids, *tensors), lengths)


def test_an_id_out_of_range(compiled):
    tensors, types = arguments(torch.float32, "cpu")
    with pytest.raises(IndexError, match="^kfconvert::embedding_layer_norm: ids holds .* word has 11 rows$"):
        ops.embedding_layer_norm(tensors[0] + 11, *tensors[1:])
    with pytest.raises(IndexError, match="token_type_ids holds .* token_type has 2 rows"):
        ops.embedding_layer_norm(*tensors, token_type_ids=types - 2)
    with pytest.raises(RuntimeError, match="ids holds .*, word has 11 rows"):  # not read there
        OPERATORS.embedding_layer_norm(tensors[0] - 11, *tensors[1:4], None, None, None, 1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("wrong", ["ids + 11, *tables", "ids, *tables, token_type_ids=ids"])
def test_an_id_out_of_range_on_a_gpu(wrong):
    """In a process of its own, whose GPU cannot be used any more."""
    code = f"""
import torch
from kfconvert import ops
ids = torch.arange(10, device="cuda").view(2, 5)
tables = [torch.randn(n, 8, device="cuda") for n in (11, 7, 2)] + [None, None]
ops.embedding_layer_norm({wrong})
torch.cuda.synchronize()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0
    assert "embedding_layer_norm: an id is out of range" in result.stderr
