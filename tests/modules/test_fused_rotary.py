import pytest
import torch
from accuracy import check_strategies

from kfconvert.modules import FusedRotary


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 5, 8), (5, 8), (8,), (1, 1, 5, 8)], ids=str)
def test_every_strategy_is_as_accurate_as_the_composition(shape, dtype, device):
    x = torch.randn(2, 5, 3, 8, device=device, dtype=dtype).transpose(1, 2)
    cos, sin = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    assert check_strategies(FusedRotary(), x, cos, sin) == ["kernel", "composition"]
    assert FusedRotary()(x, cos, sin).stride() == FusedRotary().reference(x, cos, sin).stride()
    check_strategies(FusedRotary(), x.contiguous(), cos, sin)
