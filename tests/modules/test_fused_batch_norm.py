import copy
import pickle

import pytest
import torch
from accuracy import check_strategies
from torch import nn

from kfconvert.modules import FusedBatchNormAct
from kfconvert.ops import ACTIVATIONS

NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def build(dims=2, activation="relu", channels=12, device=None, dtype=None, **options):
    norm = NORMS[dims](channels, device=device, dtype=dtype, **options)
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        if norm.affine:
            norm.weight.uniform_(0.5, 2)
            norm.bias.normal_()
    return FusedBatchNormAct(norm, activation, 0.2).eval()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_strategy_is_as_accurate_as_the_composition(activation, dtype, device):
    module = build(activation=activation, device=device, dtype=dtype)
    names = check_strategies(module, torch.randn(2, 12, 9, 7, device=device, dtype=dtype) * 3)
    assert "kernel" in names


@pytest.mark.parametrize(("dims", "shape"), [(1, (5, 12)), (1, (2, 12, 9)), (2, (2, 12, 0, 3)), (3, (2, 12, 3, 4, 5))])
def test_dimensions(dims, shape, device):
    check_strategies(build(dims, device=device), torch.randn(shape, device=device))
    check_strategies(build(dims, device=device, affine=False, eps=1e-3), torch.randn(shape, device=device))


def test_memory_format_is_kept(device):
    module = build(device=device)
    x = torch.randn(2, 12, 5, 7, device=device).contiguous(memory_format=torch.channels_last)
    check_strategies(module, x)
    with torch.no_grad():
        for module.strategy in module.strategies(x):
            assert module(x).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "shape, order", [((3, 6, 5), (0, 2, 1)), ((3, 6, 4, 5), (0, 3, 2, 1)), ((3, 5, 6, 4), (0, 1, 3, 2))], ids=str
)
def test_other_strides_become_contiguous_as_in_aten(shape, order, device):
    x = torch.randn(shape, device=device).permute(order)
    norm = (nn.BatchNorm1d if x.dim() == 3 else nn.BatchNorm2d)(5, device=device).eval()
    fused = FusedBatchNormAct(norm, "relu").eval()
    with torch.no_grad():
        want = norm(x).relu()
        for fused.strategy in fused.strategies(x):
            torch.testing.assert_close(fused(x), want)
            assert fused(x).stride() == want.stride()


def test_follows_its_tensors(device):
    module = build(device=device)
    x = torch.randn(2, 12, 5, 7, device=device)
    with torch.no_grad():
        for change in (
            lambda bn: bn.weight.mul_(2),
            lambda bn: bn.bias.add_(1),
            lambda bn: bn.running_mean.add_(0.5),
            lambda bn: bn.running_var.mul_(3),
            lambda bn: bn.load_state_dict(build(device=device).bn.state_dict()),
            lambda bn: bn.train()(torch.randn(4, 12, 5, 7, device=device)) is None or bn.eval(),
        ):
            before = module(x)
            change(module.bn)
            assert not torch.equal(module(x), before)
            torch.testing.assert_close(module(x), module.bn(x).relu())


def test_training_uses_and_updates_the_statistics_of_the_batch(device):
    module = build(device=device).train()
    norm = copy.deepcopy(module.bn)
    x = torch.randn(4, 12, 5, 7, device=device)
    torch.testing.assert_close(module(x), norm(x).relu())
    torch.testing.assert_close(module.bn.running_var, norm.running_var)
    with pytest.raises(ValueError, match="statistics of the batch"):
        module.plan(x)


@pytest.mark.parametrize("training", [False, True])
def test_gradcheck(training, device):
    module = build(channels=3, activation="silu", device=device, dtype=torch.float64).train(training)
    x = torch.randn(2, 3, 4, 4, device=device, dtype=torch.float64, requires_grad=True)

    def run(x, weight, bias):
        return torch.func.functional_call(module, {"bn.weight": weight, "bn.bias": bias}, x)

    leaves = [p.detach().clone().requires_grad_() for p in module.parameters()]
    assert torch.autograd.gradcheck(run, (x, *leaves))


def test_autocast_is_that_of_the_batch_norm(device):
    module = build(device=device)
    x = torch.randn(2, 12, 5, 7, device=device)
    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        assert module(x).dtype == module.bn(x).dtype
        torch.testing.assert_close(module(x), module.bn(x).relu())


def test_float_norm_of_half_inputs_has_no_kernel(device):
    module = build(device=device)
    x = torch.randn(2, 12, 5, 7, device=device).bfloat16()
    assert module.strategies(x) == ["composition"]


def test_copies(device):
    module = build(device=device)
    x = torch.randn(2, 12, 5, 7, device=device)
    with torch.no_grad():
        want = module(x)
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            torch.testing.assert_close(other(x), want)
    assert list(module.state_dict()) == ["bn." + name for name in module.bn.state_dict()]


def test_what_is_refused():
    with pytest.raises(TypeError, match="expected an nn.BatchNorm"):
        FusedBatchNormAct(nn.GroupNorm(2, 4))
    with pytest.raises(TypeError, match="not initialised"):
        FusedBatchNormAct(nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match="unknown activation"):
        FusedBatchNormAct(nn.BatchNorm2d(4), "swish")
