"""Attention and the rotary embedding against their definitions in plain ATen."""

import pytest
import torch
from helpers import DTYPES, check_operator
from torch.utils._python_dispatch import TorchDispatchMode

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.ops.standalone import attention, block_sparse


def tensor(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype)


def attended(leading, dtype, device, queries=20, keys=24, width=8, value_width=8):
    shapes = ((*leading, queries, width), (*leading, keys, width), (*leading, keys, value_width))
    return [tensor(shape, dtype, device) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_dropout(device, dtype):
    scores = tensor((2, 3, 5, 40), dtype, device)
    for tensors in (scores, scores.mT, scores[:0]):
        check_operator(ops.attention_dropout, reference.attention_dropout, tensors, 0.3, False)
    results = []
    for package in (ops, reference):
        torch.manual_seed(1)
        results.append(package.attention_dropout(scores, 0.3, True))
    assert torch.equal(*results)
    weights = torch.softmax(scores, -1)
    kept = results[0] != 0
    torch.testing.assert_close(results[0][kept], weights[kept] / 0.7)
    assert 0.6 < kept.float().mean() < 0.8
    with pytest.raises(ValueError, match="p must be between 0 and 1"):
        ops.attention_dropout(scores, 1.5, False)
    with pytest.raises(RuntimeError, match="expected float64, float32, float16 or bfloat16"):
        ops.attention_dropout(scores.long(), 0.3)


def test_rope_turns_pairs(device):
    """As complex numbers: (a + ib) exp(i angle)."""
    angle = torch.rand(5, 4, device=device, dtype=torch.float64) * 6
    x = torch.randn(2, 5, 8, device=device, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.complex(x[..., :4], x[..., 4:]) * turn
    cos, sin = (torch.cat((t, t), -1) for t in (angle.cos(), angle.sin()))
    torch.testing.assert_close(ops.rope(x, cos, sin), torch.cat((pairs.real, pairs.imag), -1))
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2))) * turn
    cos, sin = (t.repeat_interleave(2, -1) for t in (angle.cos(), angle.sin()))
    torch.testing.assert_close(ops.rope(x, cos, sin, True), torch.view_as_real(pairs).flatten(-2))


def random_layout(leading, queries, keys, block_size, device):
    layout = torch.rand(*leading, -(-queries // block_size), -(-keys // block_size), device=device) < 0.6
    layout[..., -1, :] = False  # queries that see nothing
    return layout


@pytest.mark.parametrize("leading", [(0, 3), (4, 4, 0), (4, 0, 4)])
def test_block_sparse_attention_of_nothing(device, leading):
    """Of half types PyTorch's attention with a mask returns None on CUDA in torch 2.11."""
    q, k, v = attended(leading, torch.float32, device)
    layout = torch.ones(3, 3, dtype=torch.bool, device=device)
    assert ops.block_sparse_attention(q, k, v, layout, 8).shape == q.shape


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "block_size, queries, keys, leading",
    [(32, 256, 300, (1, 1)), (128, 384, 256, (2, 1)), (256, 600, 512, (1, 3)), (16, 128, 130, (2, 3))],
)
def test_block_mask_is_that_of_torch(block_size, queries, keys, leading):
    """Which tiles flex_attention visits, and in which of them it looks at single scores."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    layout = random_layout(leading, queries, keys, block_size, "cpu")
    layout[..., 0, :] = True
    mask = block_sparse.block_mask(layout, block_size, queries, keys)
    edge = max(128, block_size)
    want = create_block_mask(mask.mask_mod, *leading, queries, keys, device="cpu", BLOCK_SIZE=edge)
    assert torch.equal(mask.to_dense(), want.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(mask, name), getattr(want, name))
    tensors = attended((2, 3), torch.float32, "cpu", queries, keys, 16, 16)
    want = reference.block_sparse_attention(*tensors, layout, block_size)
    torch.testing.assert_close(flex_attention(*tensors, block_mask=mask), want)


@pytest.fixture
def scores_are_written(monkeypatch):
    """As where F.scaled_dot_product_attention has no kernel that does without."""
    monkeypatch.setattr(attention, "_writes_no_scores", lambda *_: False)


def test_chunked_attention_holds_no_more_scores(device, scores_are_written):
    sizes = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            y = function(*args, **(kwargs or {}))
            sizes.extend(t.numel() for t in (y if isinstance(y, tuple) else (y,)) if isinstance(t, torch.Tensor))
            return y

    q, k, v = attended((2, 3), torch.float32, device, queries=200, keys=300, width=4, value_width=4)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), Sizes():
        ops.chunked_attention(q, k, v, 8)
    assert 2 * 3 * 8 * 300 <= max(sizes) < 2 * 3 * 16 * 300


def test_chunked_attention_is_one_call_where_no_scores_are_written(monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "flash_attention", lambda *given: calls.append(given) or given[0])
    q, k, v = attended((2, 3), torch.float32, "cpu", queries=200)
    ops.chunked_attention(q, k, v, 64)
    ops.chunked_attention(q, k, v[..., :4], 64)  # for which PyTorch has no such kernel
    assert [given[0].shape[-2] for given in calls] == [200, 64, 64, 64, 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_scores_with_a_scale_of_zero_are_zero(dtype):
    for _ in range(5):
        q, k = torch.randn(33, 33).to(dtype).t(), torch.randn(5, 33).to(dtype)
        junk = [torch.full((33, 5), 7.0, dtype=dtype) for _ in range(4)]  # what the allocator hands out next
        del junk
        assert not ops.attention_score(q, k, 0.0).any()


def test_gradients_of_scores_do_not_overflow():
    q, k = (torch.full((3, rows, 16), 100.0, dtype=torch.float16, requires_grad=True) for rows in (2, 33))
    gradients = torch.full((3, 2, 33), 200.0, dtype=torch.float16)
    for found in torch.autograd.grad(ops.attention_score(q, k, 0.05), (q, k), gradients):
        assert found.isfinite().all()
