"""embedding_layer_norm against its definition in plain ATen."""

import subprocess
import sys

import pytest
import torch
from helpers import DTYPES, assert_one_graph, check_gradients, check_operator

from kfconvert import ops
from kfconvert.kernels import reference

OPERATORS = torch.ops.kfconvert
NAMES = ("ids", "word", "position", "token_type", "weight", "bias")


def arguments(dtype, device, ids=(2, 5), kind=torch.int64, cols=8):
    """The arguments that NAMES names, and token_type_ids."""
    ids = torch.randint(0, 11, ids, device=device, dtype=kind)
    tables = [torch.randn(rows, cols, device=device).to(dtype) for rows in (11, 7, 2)]
    vectors = [torch.randn(cols, device=device).to(dtype) for _ in range(2)]
    return [ids, *tables, *vectors], torch.randint_like(ids, 2)


def compare(tensors, types=None):
    check_operator(ops.embedding_layer_norm, reference.embedding_layer_norm, *tensors, 1e-5, types, factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("typed", [False, True])
def test_as_accurate_as_aten(device, dtype, typed):
    long, short = torch.int64, torch.int32
    for shape, kind in (((2, 5), long), ((7,), short), ((2, 3, 1), long), ((0, 5), long), ((2, 0), short)):
        tensors, types = arguments(dtype, device, shape, kind)
        compare(tensors, types if typed else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 33, 96, 768, 1001, 3000, 4096, 16384, 20000])
def test_rows_of_any_length(device, dtype, cols):
    rows = 600 if device == "cuda" else 20  # more than are few rows of a GPU
    compare(*arguments(dtype, device, (rows, 6), cols=cols))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_float32_weight_and_bias(device, dtype):
    (*tensors, weight, bias), types = arguments(dtype, device)
    got = ops.embedding_layer_norm(*tensors, weight.float(), bias.float(), 1e-5, types)
    want = reference.embedding_layer_norm(tensors[0], *(t.double() for t in (*tensors[1:], weight, bias)), 1e-5, types)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want.to(dtype))


@pytest.mark.parametrize("without", [("weight",), ("bias",), ("weight", "bias")])
def test_without_weight_or_bias(device, without):
    tensors, types = arguments(torch.float32, device)
    compare([None if name in without else t for name, t in zip(NAMES, tensors, strict=True)], types)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_strides_and_offsets(device, dtype):
    (ids, *tables, weight, bias), types = arguments(dtype, device, (3, 4), cols=16)
    views = [t.mT.contiguous().mT for t in (ids, *tables, types)]
    compare([*views[:4], weight, bias], views[4])
    wider = [torch.randn(*t.shape[:-1], 20, device=device).to(dtype)[..., 3:19] for t in (*tables, weight, bias)]
    compare([ids, *wider], types)
    moved = [torch.randn(t.numel() + 1, device=device).to(dtype)[1:].view(t.shape) for t in (*tables, weight, bias)]
    compare([ids, *moved], types)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("typed", [False, True])
def test_gradients(device, dtype, typed):
    (ids, *tensors), types = arguments(dtype, device)
    types = types if typed else None
    operator, definition = (
        lambda *t, f=package.embedding_layer_norm: f(ids, *t, 1e-5, types) for package in (ops, reference)
    )
    weights = [torch.randn(2, 5, 8, device=device).to(dtype)]
    check_gradients(operator, definition, tensors, weights, factor=2)


@pytest.mark.parametrize("typed", [False, True])
def test_gradcheck_and_compile(device, typed):
    (ids, *tensors), types = arguments(torch.float64, device)
    types = types if typed else None

    def function(*tensors):
        return ops.embedding_layer_norm(ids.mT.contiguous().mT, *tensors, 1e-5, types)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), function(*tensors))
    assert torch.autograd.gradcheck(function, [t.requires_grad_() for t in tensors])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_opcheck(device, dtype):
    (ids, *tables, weight, bias), types = arguments(dtype, device)
    for given in (None, types):
        arguments_of_op = (ids, *tables, given, weight, bias, 1e-5)
        torch.library.opcheck(OPERATORS.embedding_layer_norm.default, arguments_of_op)
    torch.library.opcheck(OPERATORS.embedding_layer_norm.default, (ids, *tables, None, None, None, 1e-5))


def test_autocast(device, compiled):
    tensors, types = arguments(torch.float32, device)
    half = [t.bfloat16() if t.is_floating_point() else t for t in tensors]
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = (f(*half, 1e-5, types) for f in (ops.embedding_layer_norm, reference.embedding_layer_norm))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps)


def test_errors(device, compiled):
    (ids, word, position, token_type, weight, bias), types = arguments(torch.float32, device)
    for changed, message in (
        ({"ids": ids.float()}, "ids must be int32 or int64"),
        ({"ids": ids[0, 0]}, "ids has no dimension"),
        ({"ids": ids.repeat(1, 2)}, "position has shape .*, expected 10 or more rows of 8"),
        ({"token_type_ids": types[:1]}, r"token_type_ids has shape \(1, 5\), expected \(2, 5\)"),
        ({"word": word[0]}, r"word has shape \(8,\), expected \(V, D\)"),
        ({"token_type": token_type[:, :4]}, "token_type has shape"),
        ({"token_type": token_type[:0]}, "expected 1 or more rows of 8"),
        ({"position": position.double()}, "position has another dtype than word"),
        ({"weight": weight[:4]}, r"weight has shape \(4,\), expected \(8,\)"),
        ({"weight": weight.double()}, "weight has another dtype than word"),
        ({"word": word.long(), "position": position.long(), "token_type": token_type.long()}, "expected float64"),
    ):
        named = {"ids": ids, "word": word, "position": position, "token_type": token_type, "weight": weight}
        with pytest.raises(RuntimeError, match=message) as error:
            ops.embedding_layer_norm(**{**named, "bias": bias, **changed})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_one_graph_for_all_lengths(device, requires_grad):
    (_, *tensors), _ = arguments(torch.float32, device)
    tensors[0].requires_grad_(requires_grad)
    inputs = [torch.randint(0, 11, (3, length), device=device) for length in (4, 5, 6, 7)]
    assert_one_graph(lambda ids: ops.embedding_layer_norm(ids, *tensors), inputs)


def test_fake_tensors_are_checked():
    (ids, *tensors), _ = arguments(torch.float32, "meta")
    assert ops.embedding_layer_norm(ids, *tensors).shape == (2, 5, 8)
    with pytest.raises(RuntimeError, match="bias has shape"):
        OPERATORS.embedding_layer_norm(ids, *tensors[:3], None, tensors[3], tensors[4][:3], 1e-5)


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


@pytest.mark.cuda
def test_two_devices():
    tensors, _ = arguments(torch.float32, "cuda")
    for i in range(len(tensors)):
        with pytest.raises(RuntimeError, match="another device"):
            ops.embedding_layer_norm(*tensors[:i], tensors[i].cpu(), *tensors[i + 1 :])


@pytest.mark.cuda
@pytest.mark.gpu_memory(10)
def test_more_than_2_31_elements():
    (ids, *tensors), _ = arguments(torch.float16, "cuda", (2**31 // 4096 + 5, 1), cols=4096)
    y = ops.embedding_layer_norm(ids, *tensors)
    # In float32: float16 would round the sum.
    want = reference.embedding_layer_norm(ids[-3:], *(t.float() for t in tensors))
    torch.testing.assert_close(y[-3:], want.half(), rtol=2e-3, atol=1e-5)
