"""Attention and the rotary embedding against their definitions in plain ATen."""

import pytest
import torch
from helpers import DTYPES, check_gradients, check_operator
from support.selection import each_once, pairwise
from torch.utils._python_dispatch import TorchDispatchMode

from kfconvert import ops
from kfconvert.kernels import reference
from kfconvert.ops.standalone import attention, block_sparse

# The largest error of PyTorch's own kernels on CUDA is up to 8 times that of a product, a softmax and a product.
ATTENTION_FACTOR = {"cpu": 1.5, "cuda": 12}
LEADING = [(), (3,), (2, 3), (2, 1, 3)]


def tensor(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype)


def attended(leading, dtype, device, queries=20, keys=24, width=8, value_width=8):
    shapes = ((*leading, queries, width), (*leading, keys, width), (*leading, keys, value_width))
    return [tensor(shape, dtype, device) for shape in shapes]


def angles(shape, dtype, device, interleaved=False):
    """cos and sin whose columns come in equal pairs."""
    half = torch.rand(*shape[:-1], shape[-1] // 2, device=device) * 6
    full = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    return full.cos().to(dtype), full.sin().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_score(device, dtype, scale):
    for leading in LEADING:
        q, k, _ = attended(leading, dtype, device)
        check_operator(ops.attention_score, reference.attention_score, q, k, scale)
        check_gradients(
            lambda q, k: ops.attention_score(q, k, scale),
            lambda q, k: reference.attention_score(q, k, scale),
            [q, k],
            [tensor((*leading, 20, 24), dtype, device)],
        )


@pytest.mark.parametrize(
    "q, k",
    [
        ((2, 3, 5, 4), (1, 3, 6, 4)),
        ((5, 4), (2, 3, 6, 4)),
        ((0, 5, 4), (0, 6, 4)),
        ((2, 5, 4), (2, 0, 4)),
        ((2, 5, 0), (2, 6, 0)),
        ((2, 0, 4), (2, 6, 4)),
    ],
)
def test_attention_score_shapes(device, q, k):
    q, k = (tensor(shape, torch.float32, device) for shape in (q, k))
    scale = 0.5 if q.shape[-1] == 0 else None
    check_operator(ops.attention_score, reference.attention_score, q, k, scale)
    q = tensor(q.mT.shape, torch.float32, device).mT
    check_operator(ops.attention_score, reference.attention_score, q, k, scale)


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


@pairwise(dtype=DTYPES, is_causal=[False, True], scale=[None, 0.3])
def test_flash_attention(device, dtype, is_causal, scale):
    for leading in LEADING:
        for keys in (20, 24):
            tensors = attended(leading, dtype, device, keys=keys)
            check_operator(
                ops.flash_attention,
                reference.flash_attention,
                *tensors,
                scale=scale,
                is_causal=is_causal,
                factor=ATTENTION_FACTOR[device],
            )
        check_gradients(
            lambda *t: ops.flash_attention(*t, scale, is_causal),
            lambda *t: reference.flash_attention(*t, scale, is_causal),
            tensors,
            [tensor((*leading, 20, 8), dtype, device)],
            factor=2 * ATTENTION_FACTOR[device],
        )


@pytest.mark.parametrize(
    "shapes",
    [
        {"leading": (0, 2)},
        {"leading": (2, 0)},
        {"leading": (2, 2), "queries": 0},
        {"leading": (2,), "keys": 0},
        {"leading": (2, 2), "value_width": 12},
        {"leading": (1, 2), "queries": 1, "keys": 1},
    ],
)
def test_flash_attention_shapes(device, shapes):
    tensors = attended(dtype=torch.float32, device=device, **shapes)
    check_operator(ops.flash_attention, reference.flash_attention, *tensors, factor=ATTENTION_FACTOR[device])


def test_layouts(device):
    q, k, v = (tensor((2, 20, 3, 8), torch.float32, device).transpose(1, 2) for _ in "qkv")
    for tensors in ((q, k, v), (q.mT.contiguous().mT, k, v[..., :1].expand(2, 3, 20, 8))):
        check_operator(ops.flash_attention, reference.flash_attention, *tensors, factor=ATTENTION_FACTOR[device])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("leading", [(), (2,), (2, 3), (0,)])
def test_fused_multihead_attention(device, dtype, leading):
    tensors = attended(leading, dtype, device, width=32, value_width=16)
    factor = ATTENTION_FACTOR[device]
    check_operator(ops.fused_multihead_attention, reference.fused_multihead_attention, *tensors, 4, factor=factor)
    if 0 not in leading:
        check_gradients(
            lambda *t: ops.fused_multihead_attention(*t, 4),
            lambda *t: reference.fused_multihead_attention(*t, 4),
            tensors,
            [tensor((*leading, 20, 16), dtype, device)],
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope(device, dtype, interleaved):
    for shape, angle_shape in (
        ((2, 3, 7, 8), (7, 8)),
        ((2, 3, 7, 8), (2, 1, 7, 8)),
        ((7, 8), (8,)),
        ((8,), (8,)),
        ((0, 3, 7, 8), (7, 8)),
        ((2, 7, 0), (7, 0)),
    ):
        x = tensor(shape, dtype, device)
        cos, sin = angles(angle_shape, dtype, device, interleaved)
        for x in (x, tensor(x.mT.shape, dtype, device).mT if x.dim() > 1 else x):
            check_operator(ops.rope, reference.rope, x, cos, sin, interleaved)
    x, (cos, sin) = tensor((2, 7, 8), dtype, device), angles((7, 8), dtype, device, interleaved)
    check_gradients(
        lambda *t: ops.rope(*t, interleaved),
        lambda *t: reference.rope(*t, interleaved),
        [x, cos, sin],
        [tensor((2, 7, 8), dtype, device)],
    )


@each_once(dtype=DTYPES, interleaved=[False, True])
def test_rope_of_other_layouts(device, dtype, interleaved):
    """Heads between batch and sequence, slices, rows longer than a block, more dimensions than the kernel takes."""
    for x, angle_shape in (
        (tensor((2, 5, 3, 16), dtype, device).transpose(1, 2), (5, 16)),
        (tensor((2, 5, 3, 48), dtype, device)[..., 16:32].transpose(1, 2), (2, 1, 5, 16)),
        (tensor((2, 3, 4, 4100), dtype, device)[:, 1:], (4, 4100)),
        (tensor((2, 2, 3, 2, 3, 2, 3, 8), dtype, device).transpose(0, 3).transpose(1, 5), (3, 1, 3, 8)),
    ):
        cos, sin = angles(angle_shape, dtype, device, interleaved)
        y = check_operator(ops.rope, reference.rope, x, cos, sin, interleaved)
        assert not y.requires_grad and y.data_ptr() != x.data_ptr()
        arguments = (x, cos, sin, interleaved, True)
        for operator in (torch.ops.kfconvert.rope.default, torch.ops.kfconvert.rope_inference.default):
            torch.library.opcheck(operator, arguments)
    x, (cos, sin) = tensor((3, 2, 5, 8), dtype, device).mT.contiguous().mT, angles((5, 8), dtype, device, interleaved)
    check_gradients(
        lambda t: ops.rope(t, cos.to(t.dtype), sin.to(t.dtype), interleaved),
        lambda t: reference.rope(t, cos.to(t.dtype), sin.to(t.dtype), interleaved),
        [x],
        [tensor((3, 2, 5, 8), dtype, device)],
    )


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_attention(device, dtype, interleaved):
    q, k, v = attended((2, 3), dtype, device, keys=20)
    cos, sin = angles((20, 8), dtype, device, interleaved)
    options = (0.3, True, interleaved)
    factor = ATTENTION_FACTOR[device]
    check_operator(ops.rope_attention, reference.rope_attention, q, k, v, cos, sin, *options, factor=factor)
    check_gradients(
        lambda *t: ops.rope_attention(*t, cos.to(t[0].dtype), sin.to(t[0].dtype), *options),
        lambda *t: reference.rope_attention(*t, cos.to(t[0].dtype), sin.to(t[0].dtype), *options),
        [q, k, v],
        [tensor((2, 3, 20, 8), dtype, device)],
        factor=2 * ATTENTION_FACTOR[device],
    )


# Of all of these the GPU's kernel of flex_attention takes that of 256 queries only.
@pytest.mark.parametrize(
    "leading, layout_leading, queries, keys, block_size",
    [
        ((), (), 20, 24, 8),
        ((3,), (), 24, 24, 8),
        ((2, 3), (3,), 20, 24, 5),
        ((2, 3), (2, 1), 20, 24, 32),
        ((2, 1, 3), (2, 1, 3), 20, 24, 8),
        ((0, 3), (3,), 20, 24, 8),
        ((2, 3), (), 256, 300, 32),
        ((2, 3), (2, 1), 150, 300, 100),
        ((4, 4, 0), (4, 1, 1), 16, 16, 8),
        ((4, 0, 4), (), 16, 16, 8),
    ],
)
def test_block_sparse_attention(device, leading, layout_leading, queries, keys, block_size):
    layout = random_layout(layout_leading, queries, keys, block_size, device)
    tensors = attended(leading, torch.float32, device, queries, keys, 16, 16)
    check_operator(ops.block_sparse_attention, reference.block_sparse_attention, *tensors, layout, block_size, factor=3)


def random_layout(leading, queries, keys, block_size, device):
    layout = torch.rand(*leading, -(-queries // block_size), -(-keys // block_size), device=device) < 0.6
    layout[..., -1, :] = False  # queries that see nothing
    return layout


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries, block_size", [(24, 8), (256, 64), (300, 128)])
def test_block_sparse_attention_of_all_dtypes(device, dtype, queries, block_size):
    layout = random_layout((2,), queries, queries, block_size, device)
    tensors = attended((1, 2), dtype, device, queries, queries, 16, 16)
    call = (layout, block_size, 0.4)
    operator, definition = ops.block_sparse_attention, reference.block_sparse_attention
    y = check_operator(operator, definition, *tensors, *call, factor=3)
    assert (y[..., -(queries % block_size or block_size) :, :] == 0).all()
    weights = [tensor(tensors[0].shape, dtype, device)]
    check_gradients(lambda *t: operator(*t, *call), lambda *t: definition(*t, *call), tensors, weights, factor=3)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "block_size, queries, keys, leading",
    [
        (32, 256, 300, (1, 1)),
        (128, 384, 256, (2, 1)),
        (256, 600, 512, (1, 3)),
        (16, 128, 130, (2, 3)),
    ],
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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_size", [1, 7, 10, 20, 64])
def test_chunked_attention(device, scores_are_written, dtype, chunk_size):
    for leading in ((), (2, 3), (0, 2)):
        tensors = attended(leading, dtype, device, value_width=12)
        for scale in (None, 0.3):
            check_operator(
                ops.chunked_attention,
                reference.chunked_attention,
                *tensors,
                chunk_size,
                scale,
                factor=2 * ATTENTION_FACTOR[device],
            )
            torch.testing.assert_close(
                reference.chunked_attention(*tensors, chunk_size, scale),
                reference.flash_attention(*tensors, scale),
                # On CUDA half types are summed in another order for other numbers of rows.
                **({"rtol": 2e-2, "atol": 2e-3} if dtype.itemsize == 2 else {}),
            )
    check_gradients(
        lambda *t: ops.chunked_attention(*t, chunk_size),
        lambda *t: reference.chunked_attention(*t, chunk_size),
        attended((2, 2), dtype, device),
        [tensor((2, 2, 20, 8), dtype, device)],
        factor=2 * ATTENTION_FACTOR[device],
    )


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


FUNCTIONS = {
    "chunked_attention": lambda q, k, v, cos, sin: ops.chunked_attention(q, k, v, 3),
    "attention_score": lambda q, k, v, cos, sin: ops.attention_score(q, k),
    "attention_dropout": lambda q, k, v, cos, sin: ops.attention_dropout(q, 0.0),
    "flash_attention": lambda q, k, v, cos, sin: ops.flash_attention(q, k, v),
    "fused_multihead_attention": lambda q, k, v, cos, sin: ops.fused_multihead_attention(q, k, v, 2),
    "rope": lambda q, k, v, cos, sin: ops.rope(q, cos, sin),
    "rope_attention": lambda q, k, v, cos, sin: ops.rope_attention(q, k, v, cos, sin, is_causal=True),
    "block_sparse_attention": lambda q, k, v, cos, sin: ops.block_sparse_attention(
        q, k, v, torch.eye(2, device=q.device) > 0, 2
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradcheck(device, name):
    q, k, v = attended((2, 1), torch.float64, device, 4, 4, 4, 4)
    tensors = (q, k, v, *angles((4, 4), torch.float64, device))
    assert torch.autograd.gradcheck(FUNCTIONS[name], [t.requires_grad_() for t in tensors])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_compile(device, name):
    q, k, v = attended((2, 1), torch.float32, device, 4, 4, 4, 4)
    tensors = (q, k, v, *angles((4, 4), torch.float32, device))
    compiled = torch.compile(FUNCTIONS[name], backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), FUNCTIONS[name](*tensors))
    torch.compiler.reset()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_autocast(device, name):
    q, k, v = attended((2, 1), torch.float32, device, 4, 4, 4, 4)
    tensors = (q.bfloat16(), k, v, *angles((4, 4), torch.float32, device))
    with torch.autocast(device, dtype=torch.bfloat16):
        y = FUNCTIONS[name](*tensors)
    want = FUNCTIONS[name](*(t.float() for t in tensors))
    torch.testing.assert_close(y.float(), want, rtol=5e-2, atol=5e-2)
    if name != "rope":
        assert y.dtype == torch.bfloat16 or name == "attention_dropout"


def test_errors(device):
    q, k, v = attended((2, 3), torch.float32, device)
    layout = torch.ones(3, 3, dtype=torch.bool, device=device)
    cos, sin = angles((20, 8), torch.float32, device)
    sparse = ops.block_sparse_attention
    for function, arguments, message in (
        (ops.attention_score, (q.long(), k), "expected float64, float32, float16 or bfloat16"),
        (ops.attention_score, (q, k.double()), "k has another dtype than q"),
        (ops.attention_score, (q, k[..., :5]), r"expected \(..., N, D\) and \(..., M, D\)"),
        (ops.attention_score, (q, k[:, :2]), "do not broadcast"),
        (ops.chunked_attention, (q, k, v, 0), "chunk_size is 0, expected 1 or more"),
        (ops.chunked_attention, (q, k[:1], v, 8), "has other leading dimensions"),
        (ops.flash_attention, (q, k[:1], v), "has other leading dimensions"),
        (ops.flash_attention, (q, k, v[..., :5, :]), r"v has shape \(2, 3, 5, 8\), but k of shape"),
        (ops.flash_attention, (q[0, 0, 0], k, v), r"expected \(..., N, D\)"),
        (ops.flash_attention, (q, k, v.half()), "v has another dtype"),
        (ops.fused_multihead_attention, (q, k, v, 3), "8 columns of q and k and 8 of v do not make 3 heads"),
        (ops.fused_multihead_attention, (q, k, v, 0), "do not make 0 heads"),
        (ops.rope, (q[..., :7], cos, sin), "expected an even last dimension"),
        (ops.rope, (q, cos[:5], sin), r"cos has shape \(5, 8\), expected \(2, 3, 20, 8\) or what broadcasts"),
        (ops.rope, (q, cos, sin[..., :1]), "sin has shape .* with 8 columns"),
        (ops.rope, (q, cos, sin.double()), "sin has another dtype"),
        (ops.rope, (q[0, 0], cos[None], sin), "cos has shape"),
        (ops.rope_attention, (q, k, v, cos, sin), r"cos has shape \(20, 8\), expected \(2, 3, 24, 8\)"),
        (sparse, (q, k, v, layout.float(), 8), "layout is not boolean"),
        (sparse, (q, k, v, layout[:2], 8), r"layout has shape \(2, 3\), expected \(2, 3, 3, 3\)"),
        (sparse, (q, k, v, layout.expand(2, 3, 3), 8), "or what broadcasts to it"),
        (sparse, (q, k, v, layout, 0), "block_size is 0"),
    ):
        with pytest.raises(RuntimeError, match=message) as error:
            function(*arguments)
        assert "\n" not in str(error.value)


@pytest.mark.cuda
def test_two_devices():
    q, k, v = attended((2, 3), torch.float32, "cuda")
    cos, sin = angles((20, 8), torch.float32, "cpu")
    layout = torch.ones(3, 3, dtype=torch.bool)
    for function, arguments in (
        (ops.attention_score, (q, k.cpu())),
        (ops.flash_attention, (q, k, v.cpu())),
        (ops.fused_multihead_attention, (q, k.cpu(), v, 2)),
        (ops.rope, (q, cos, sin)),
        (ops.rope_attention, (q, k, v, cos, sin)),
        (ops.block_sparse_attention, (q, k, v, layout, 8)),
    ):
        with pytest.raises(RuntimeError, match="another device"):
            function(*arguments)


def test_other_names():
    assert ops.fused_attention_score is ops.attention_score


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


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_causal_attention_with_a_scale_that_is_not_positive(scale):
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    torch.testing.assert_close(
        ops.flash_attention(q, k, v, scale, True), reference.flash_attention(q, k, v, scale, True)
    )
