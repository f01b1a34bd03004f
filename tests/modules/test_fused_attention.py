import pytest
import torch
from accuracy import check_strategies
from support.devices import without_onednn

from kfconvert.modules import FusedAttention, MaskTerm

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def qkv(leading, device, dtype, n=17, m=11, width=16, value_width=16):
    return (
        torch.randn(*leading, n, width, device=device, dtype=dtype),
        torch.randn(*leading, m, width, device=device, dtype=dtype),
        torch.randn(*leading, m, value_width, device=device, dtype=dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("leading", [(6,), (2, 3)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_strategy_is_as_accurate_as_the_composition(transposed, leading, dtype, device):
    q, k, v = qkv(leading, device, dtype)
    k = k.transpose(-1, -2).contiguous() if transposed else k
    check_strategies(FusedAttention(0.25, key_transposed=transposed), q, k, v)
    mask = torch.randn(*leading[1:], 17, 11, device=device, dtype=dtype)
    check_strategies(FusedAttention(0.25, key_transposed=transposed, terms=(MaskTerm(),)), q, k, v, mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 17, 11), (2, 1, 17, 11), (2, 1, 1, 11), (1, 3, 17, 1), (17, 11), (3, 17, 11)])
def test_masks_are_broadcast(shape, dtype, device):
    q, k, v = qkv((2, 3), device, dtype)
    mask = torch.randn(shape, device=device, dtype=dtype)
    check_strategies(FusedAttention(0.25, terms=(MaskTerm(),)), q, k, v, mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [8, 64])
def test_a_row_that_is_hidden_everywhere_is_uniform(width, dtype, device):
    q, k, v = qkv((2, 3), device, dtype, width=width, value_width=width)
    lowest = torch.finfo(dtype).min
    hidden = torch.zeros(2, 1, 17, 11, dtype=torch.bool, device=device)
    hidden[0, :, 4], hidden[1, :, :, 7:] = True, True
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill(hidden, lowest)
    added = FusedAttention(0.25, terms=(MaskTerm(),), saturated=True)
    filled = FusedAttention(0.25, terms=(MaskTerm(lowest / 2),))
    shown = FusedAttention(0.25, terms=(MaskTerm(lowest / 2, hidden=False),))
    for module, given in ((added, mask), (filled, hidden), (shown, ~hidden)):
        y = module(q, k, v, given)
        torch.testing.assert_close(y[0, :, 4], v[0].mean(-2), rtol=2e-2, atol=4 * torch.finfo(dtype).eps)
        check_strategies(module, q, k, v, given)


@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [11, 32])
def test_nan_and_infinity_spread_as_in_the_composition(keys, dtype, special, device):
    q, k, v = qkv((2, 3), device, dtype, m=keys)
    q[0, 1, 2, 3], k[1, 0, keys // 2, 5], v[1, 2, keys // 3, 4] = special, special, special
    module = FusedAttention(0.25)
    expected = module.reference(q, k, v)
    assert expected.isnan().any()
    for module.strategy in module.strategies(q, k, v):
        y = module(q, k, v)
        if device.type == "cuda" and dtype == torch.float32:  # its kernels make NaN of products with infinity
            assert not y[~expected.isfinite()].isfinite().any()
        else:
            torch.testing.assert_close(y, expected, equal_nan=True, rtol=3e-2, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_in_the_first_dimension(dtype, device):
    q, k, v = qkv((6,), device, dtype)
    slopes = torch.randn(6, 1, 11, device=device, dtype=dtype)
    mask = torch.randn(2, 1, 17, 11, device=device, dtype=dtype)
    module = FusedAttention(0.25, terms=(MaskTerm(split=True), MaskTerm()), split=3)
    check_strategies(module, q, k, v, slopes, mask)
    scores = (q @ k.transpose(1, 2) * 0.25 + slopes).view(2, 3, 17, 11) + mask
    expected = torch.softmax(scores, -1).view(6, 17, 11) @ v
    torch.testing.assert_close(module(q, k, v, slopes, mask), expected, rtol=3e-2, atol=8 * torch.finfo(dtype).eps)
    split = module(q, k, v.view(2, 3, 11, 16), slopes, mask)
    torch.testing.assert_close(split.flatten(0, 1), module(q, k, v, slopes, mask))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_windows_in_the_first_dimension(dtype, device):
    q, k, v = qkv((8, 3), device, dtype)
    bias = torch.randn(1, 3, 17, 11, device=device, dtype=dtype)
    shift = torch.randn(1, 4, 1, 17, 11, device=device, dtype=dtype)
    module = FusedAttention(0.25, terms=(MaskTerm(), MaskTerm()), split=4)
    check_strategies(module, q, k, v, bias, shift)
    scores = ((q @ k.transpose(-1, -2)) * 0.25 + bias).view(2, 4, 3, 17, 11) + shift
    expected = torch.softmax(scores.view(8, 3, 17, 11), -1) @ v
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(module(q, k, v, bias, shift), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("leading", [(6,), (2, 3)], ids=str)
@without_onednn()
def test_rows_of_minus_infinity_are_nan(leading, dtype, device):
    q, k, v = qkv(leading, device, dtype)
    hidden = torch.zeros(17, 11, dtype=torch.bool, device=device)
    hidden[4], hidden[:, 8:] = True, True
    mask = torch.zeros(17, 11, dtype=dtype, device=device).masked_fill(hidden, -torch.inf)
    mask[6] = torch.finfo(dtype).min
    added = FusedAttention(0.25, terms=(MaskTerm(),), saturated=True, empty_rows=True)
    filled = FusedAttention(0.25, terms=(MaskTerm(-torch.inf),), empty_rows=True)
    tolerances = {"rtol": 3e-2, "atol": 8 * torch.finfo(dtype).eps, "equal_nan": True}
    for module, given in ((added, mask), (filled, hidden)):
        expected = module.reference(q, k, v, given)
        assert expected[..., 4, :].isnan().all() and expected[..., :4, :].isfinite().all()
        for module.strategy in module.strategies(q, k, v, given):
            torch.testing.assert_close(module(q, k, v, given), expected, **tolerances)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, windows", [(3, 64), (6, 16)])
def test_one_triton_kernel(heads, windows, dtype):
    """Windows of Swin: q, k and v are columns of one product, and the result is in the order of the next."""
    pytest.importorskip("triton")
    q, k, v = torch.randn(4 * windows, 49, 3, heads, 32, device="cuda", dtype=dtype).permute(2, 0, 3, 1, 4)
    bias = torch.randn(1, heads, 49, 49, device="cuda", dtype=dtype)
    shift = torch.randint(2, (1, windows, 1, 49, 49), device="cuda").to(dtype) * -100
    module = FusedAttention(32**-0.5, terms=(MaskTerm(), MaskTerm()), split=windows)
    assert "triton" in check_strategies(module, q, k, v, bias, shift)
    assert check_strategies(FusedAttention(32**-0.5), q[..., :4, :], k, v) == ["sdpa", "composition"]
    module = FusedAttention(32**-0.5)
    module.strategy = "triton"
    plan, longer = module.plan(q, k, v), k.repeat(1, 1, 6, 1)
    assert plan(q, k, v).transpose(1, 2).is_contiguous()
    torch.testing.assert_close(plan(q, longer, longer), module.reference(q, longer, longer), rtol=3e-2, atol=2e-2)
    assert module(q.requires_grad_(), k, v).requires_grad
