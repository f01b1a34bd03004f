"""contract against torch.einsum in float64: shapes, gradients, errors."""

import pytest
import torch
from helpers import DTYPES, assert_one_graph, check_gradients, check_operator

from kfconvert import ops
from kfconvert.kernels import reference

# equation, shapes of the tensors, shape of the result
CASES = [
    ("ij,jk->ik", [(5, 6), (6, 7)], (35,)),
    ("bij,bjk->bik", [(2, 5, 6), (2, 6, 4)], (10, -1)),
    ("bnhd,hde->bne", [(2, 5, 3, 4), (3, 4, 6)], (10, 6)),
    ("bhid,bhjd->bhij", [(2, 3, 5, 4), (2, 3, 7, 4)], [6, 5, 7]),
    ("ij->ji", [(5, 6)], (2, 15)),
    ("ij,ij", [(5, 6), (5, 6)], ()),
    ("ij,jk,kl->il", [(5, 6), (6, 3), (3, 4)], None),
    ("ij,jk->ik", [(0, 6), (6, 7)], (0, 7)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("equation", "shapes", "shape"), CASES)
def test_as_accurate_as_einsum(device, dtype, equation, shapes, shape):
    tensors = [torch.randn(sizes, device=device).to(dtype) for sizes in shapes]
    operator, definition = (lambda *t, p=package: p.contract(equation, *t, shape=shape) for package in (ops, reference))
    y = check_operator(operator, definition, *tensors)
    assert torch.equal(y.flatten(), torch.einsum(equation, *tensors).flatten())
    if shape is not None and -1 not in shape:
        assert y.shape == tuple(shape)
    check_gradients(operator, definition, tensors, [torch.randn_like(y)], factor=3)


def test_the_result_is_a_view(device):
    """Of what einsum made, whose axes lie in order here: nothing is copied."""
    x, w = torch.randn(4, 5, 6, device=device), torch.randn(6, 8, device=device)
    assert ops.contract("bij,jk->bik", x, w, shape=(20, 8))._base is not None


def test_gradcheck_and_compile(device):
    leaves = [torch.randn(size, device=device, dtype=torch.float64, requires_grad=True) for size in ((2, 3), (3, 4))]
    assert torch.autograd.gradcheck(lambda *t: ops.contract("ij,jk->ik", *t, shape=(8,)), leaves)
    w = torch.randn(4, 3, device=device)
    inputs = [torch.randn(rows, 4, device=device) for rows in (5, 6, 7)]
    assert_one_graph(lambda x: ops.contract("ij,jk->ik", x, w, shape=(-1,)), inputs)


def test_autocast(device):
    x = torch.randn(4, 5, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert ops.contract("ij,jk->ik", x, x.mT.bfloat16(), shape=(16,)).dtype == torch.bfloat16


def test_errors(device):
    x = torch.randn(4, 6, device=device)
    product = "ij,kj->ik"
    for call, error, match in (
        (lambda: ops.contract(product, x, x, shape=(15,)), RuntimeError, r"shape \(15,\) does not hold .* \(4, 4\)"),
        (lambda: ops.contract(product, x, x, shape=(-1, -1)), RuntimeError, "does not hold"),
        (lambda: ops.contract(product, x, x, shape=(-1, 3)), RuntimeError, "does not hold"),
        (lambda: ops.contract(product, x, x, shape=(-2, -8)), RuntimeError, "does not hold"),
        (lambda: ops.contract(product, x, x, shape=16), TypeError, "shape must be a tuple of integers, got int"),
        (lambda: ops.contract(product, x, x, shape=(2.5, 4)), TypeError, "shape must be an integer, got float"),
        (lambda: ops.contract(product, x, [1.0]), TypeError, "tensors must be tensors, got list"),
        (lambda: ops.contract(product, x, x, (16,)), TypeError, "tensors must be tensors, got tuple"),
        (lambda: ops.contract(x, x), TypeError, "equation must be text, got Tensor"),
        (lambda: ops.contract(product), RuntimeError, "there is no tensor"),
        (lambda: ops.contract(product, x, x.double()), RuntimeError, "tensor 1 has another dtype than tensor 0"),
        (lambda: ops.contract("ij->i", x.long()), RuntimeError, "expected float64, float32, float16 or bfloat16"),
        (lambda: ops.contract("ij,jk->ik", x, x), RuntimeError, "einsum"),
        (lambda: ops.contract("ij,j", x), RuntimeError, "einsum"),
    ):
        with pytest.raises(error, match=match) as caught:
            call()
        assert "\n" not in str(caught.value)
