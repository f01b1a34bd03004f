"""fold_batch_norm against F.batch_norm in float64, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from helpers import DTYPES

from kfconvert.ops.fold_batch_norm import fold_batch_norm
from kfconvert.ops.norms import accumulator

OPERATOR = torch.ops.kfconvert.fold_batch_norm.default


def statistics(channels, dtype, device):
    mean, weight, bias, before = (torch.randn(channels, device=device).to(dtype) for _ in range(4))
    return mean, torch.rand(channels, device=device).to(dtype) + 0.1, weight, bias, before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", (1, 7, 300))
@pytest.mark.parametrize("optional", (True, False))
def test_folds(device, compiled, dtype, channels, optional):
    mean, variance, weight, bias, before = statistics(channels, dtype, device)
    if not optional:
        weight = bias = before = None
    wide = accumulator(dtype)
    scale, shift = fold_batch_norm(mean, variance, weight, bias, 1e-3, before, wide)
    assert scale.dtype == shift.dtype == wide and scale.shape == shift.shape == mean.shape
    x = torch.randn(5, channels, dtype=torch.float64, device=device)
    moved = x if before is None else x + before.double()
    weights = (None if t is None else t.double() for t in (weight, bias))
    want = F.batch_norm(moved, mean.double(), variance.double(), *weights, False, 0.0, 1e-3)
    tolerance = 1e-13 if wide == torch.float64 else 1e-6
    torch.testing.assert_close(x * scale.double() + shift.double(), want, rtol=tolerance, atol=10 * tolerance)


def test_other_dtypes_are_converted(device, compiled):
    mean, variance, weight, bias, before = statistics(6, torch.float16, device)
    got = fold_batch_norm(mean.float(), variance, weight.double(), bias, 1e-5, before)
    want = fold_batch_norm(mean.float(), variance.float(), weight.float(), bias.float(), 1e-5, before.float())
    torch.testing.assert_close(got, want)


def test_operator(device, compiled):
    torch.library.opcheck(OPERATOR, (*statistics(5, torch.bfloat16, device), 1e-5))
    assert all(t.shape == (0,) for t in OPERATOR(*statistics(0, torch.float32, device), 1e-5))
    strided = [t[::2] for t in statistics(10, torch.float32, device)]
    torch.testing.assert_close(OPERATOR(*strided, 0.1), OPERATOR(*(t.clone() for t in strided), 0.1))


def test_errors(device, compiled):
    mean, variance, weight, bias, before = statistics(4, torch.float32, device)
    for arguments, match in (
        ((mean, variance[:3], None, None, None), "variance has shape"),
        ((mean, variance, weight, bias, before[:1]), "before has shape"),
        ((mean[None], variance, None, None, None), r"mean has shape \(1, ?4\)"),
        ((mean, variance, weight.double(), None, None), "weight has another dtype"),
        ((mean.int(), variance, None, None, None), "expected float64, float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=match):
            OPERATOR(*arguments, 1e-5)
