import copy

import pytest
import torch
from accuracy import check_strategies
from support.selection import each_once
from torch import nn

from kfconvert.modules import (
    FusedConv1dBNReLU,
    FusedConv2dBN,
    FusedConv2dBNHardswish,
    FusedConv2dBNReLU,
    FusedConv2dBNReLU6,
    FusedConv2dBNSiLU,
    FusedConv3dBNReLU,
    FusedConvBN,
)
from kfconvert.ops import ACTIVATIONS

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def randomise(module):
    """Weights, running means and variances as different from their defaults as a trained model's are."""
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name.endswith("running_var") or name.endswith("bn.weight"):
                tensor.uniform_(0.5, 2)
            elif tensor.is_floating_point() and not name.endswith("conv.weight"):
                tensor.normal_()
    return module


def build(
    dims=2, channels=(12, 16), kernel=3, bn=True, activation="relu", device=None, dtype=None, affine=True, eps=1e-5,
    **options,
):  # fmt: skip
    conv = CONVOLUTIONS[dims](*channels, kernel, device=device, dtype=dtype, **options)
    norm = NORMS[dims](channels[1], device=device, dtype=dtype, affine=affine, eps=eps) if bn else None
    return randomise(FusedConvBN(conv, norm, activation, 0.2).eval())


def check(module, dims=2, size=9, batch=2, residual=True):
    weight = module.conv.weight
    x = torch.randn(batch, module.conv.in_channels, *[size] * dims, device=weight.device, dtype=weight.dtype)
    names = check_strategies(module, x)
    if residual:
        with torch.no_grad():
            shape = module.reference(x).shape
        check_strategies(module, x, torch.randn(shape, device=weight.device, dtype=weight.dtype))
    return names


@each_once(activation=ACTIVATIONS, dtype=DTYPES)
def test_every_strategy_is_as_accurate_as_the_composition(activation, dtype, device):
    check(build(activation=activation, device=device, dtype=dtype, padding=1, bias=False))


@each_once(
    options=[
        dict(stride=2, padding=1),
        dict(dilation=2, padding="same"),
        dict(kernel=2, padding="same"),
        dict(kernel=4, padding="same", padding_mode="circular"),
        dict(padding="valid"),
        dict(padding=1, padding_mode="reflect"),
        dict(padding=2, padding_mode="replicate", stride=2),
        dict(groups=4, padding=1),
        dict(channels=(12, 12), groups=12, padding=1, bias=False),
        dict(kernel=1),
        dict(kernel=1, stride=2, bias=False),
        dict(bn=False, padding=1),
        dict(bn=False, bias=False),
        dict(affine=False, bias=False, eps=1e-3),
    ],
    dims=[1, 2, 3],
)
def test_kinds_of_convolution(dims, options, device):
    module = build(dims, device=device, **options)
    check(module, dims)
    x = torch.randn(2, 12, *[9] * dims, device=device)
    with torch.no_grad():
        y = module.conv(x) if module.bn is None else module.bn(module.conv(x))
        torch.testing.assert_close(module.reference(x), y.relu())


@each_once(
    options=[dict(), dict(stride=2, bias=False), dict(bn=False), dict(groups=2), dict(padding=1)],
    channels_last=[False, True],
    dims=[2, 1, 3],
)
def test_an_image_of_one_pixel(dims, channels_last, options, device):
    module = build(dims, kernel=1, activation="silu", device=device, **options)
    module.channels_last = channels_last
    assert ("linear" in check(module, dims, size=1)) == (not options.keys() & {"groups", "padding"})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_plan_for_one_pixel_serves_other_sizes(dtype, device):
    module = build(kernel=1, device=device, dtype=dtype)
    pixel = torch.randn(2, 12, 1, 1, device=device, dtype=dtype)
    plan = module.plan(pixel)
    module.strategy = next(name for name in module.strategies(pixel) if name in ("kernel", "folded"))
    for shape in ((3, 12, 1, 1), (0, 12, 1, 1), (2, 12, 3, 2), (2, 12, 1, 2)):
        x = torch.randn(shape, device=device, dtype=dtype)
        residual = torch.randn(shape[0], 16, *shape[2:], device=device, dtype=dtype)
        with torch.no_grad():
            for got, want in ((plan(x), module(x)), (plan(x, residual), module(x, residual))):
                scale = want.abs().max().item() if want.numel() else 1.0
                torch.testing.assert_close(got, want, rtol=0, atol=2 * torch.finfo(dtype).eps * scale)


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("dims", [2, 3])
def test_memory_formats(dims, arrives, asked, device):
    channels_last = torch.channels_last if dims == 2 else torch.channels_last_3d
    module = build(dims, activation="silu", device=device, padding=1)
    module.channels_last = asked
    x = torch.randn(2, 12, *[8] * dims, device=device)
    x = x.contiguous(memory_format=channels_last) if arrives else x
    residual = torch.randn(2, 16, *[8] * dims, device=device)
    check_strategies(module, x)
    check_strategies(module, x, residual)
    check_strategies(module, x, residual.contiguous(memory_format=channels_last))
    expected_format = channels_last if asked or arrives else torch.contiguous_format
    with torch.no_grad():
        for module.strategy in module.strategies(x):
            for y in (module(x), module(x, residual.contiguous(memory_format=expected_format))):
                assert y.is_contiguous(memory_format=expected_format)


def test_strided_and_empty_inputs(device):
    module = build(device=device, padding=1)
    check_strategies(module, torch.randn(2, 12, 9, 18, device=device)[..., ::2])
    check_strategies(module, torch.randn(9, 9, 2, 12, device=device).permute(2, 3, 1, 0))
    check(module, batch=0)


def test_shapes_may_vary(device):
    module = build(device=device, padding=1)
    for batch, size in ((1, 9), (3, 9), (3, 17), (1, 9)):
        check(module, size=size, batch=batch)


def test_half_convolution_with_float_norm(device):
    module = build(device=device, padding=1)
    module.conv.half()
    x = torch.randn(2, 12, 9, 9, device=device, dtype=torch.float16)
    check_strategies(module, x)


def test_packed_weights_are_offered_on_cpu():
    module = build(padding=1)
    x = torch.empty(1, 12, 9, 9)
    assert module.strategies(x) == ["kernel", "onednn", "composition"]
    assert module.strategies(x.to(memory_format=torch.channels_last))[0] == "onednn"
    module.channels_last = True
    assert module.strategies(x)[0] == "onednn"
    assert build(dims=1).strategies(torch.empty(1, 12, 9)) == ["kernel", "composition"]
    with torch.backends.mkldnn.flags(enabled=False):
        assert "onednn" not in module.strategies(torch.empty(1, 12, 9, 9))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("channels_last", [False, True])
def test_training_is_that_of_the_originals(momentum, channels_last, device):
    conv, bn = nn.Conv2d(4, 8, 3, device=device), nn.BatchNorm2d(8, momentum=momentum, device=device)
    module = FusedConv2dBNReLU(copy.deepcopy(conv), copy.deepcopy(bn))
    module.channels_last = channels_last
    assert module.training
    for _ in range(3):
        x = torch.randn(2, 4, 9, 9, device=device)
        torch.testing.assert_close(module(x), bn(conv(x)).relu())
    torch.testing.assert_close(module.bn.state_dict(), bn.state_dict())
    assert module.bn.num_batches_tracked == 3


def test_no_running_statistics_means_batch_statistics(device):
    conv = nn.Conv2d(4, 8, 3, device=device).eval()
    bn = nn.BatchNorm2d(8, track_running_stats=False, device=device).eval()
    module, x = FusedConv2dBNReLU(conv, bn), torch.randn(2, 4, 9, 9, device=device)
    with torch.no_grad():
        torch.testing.assert_close(module(x), bn(conv(x)).relu())
        torch.testing.assert_close(module.reference(x), bn(conv(x)).relu())


def test_frozen_norm_in_training(device):
    module = build(device=device, padding=1).train()
    module.bn.eval()
    before = copy.deepcopy(module.bn.state_dict())
    x = torch.randn(2, 12, 9, 9, device=device)
    torch.testing.assert_close(module(x), module.reference(x))
    module(x).sum().backward()
    assert module.conv.weight.grad is not None and module.bn.weight.grad is not None
    torch.testing.assert_close(module.bn.state_dict(), before)


def train(module):
    module.train()
    with torch.no_grad():
        module(torch.randn(2, 12, 9, 9, device=module.conv.weight.device))
    module.eval()


def replace_norm(module):
    module.bn = randomise(nn.BatchNorm2d(16, device=module.conv.weight.device)).eval()


@pytest.mark.parametrize("change", [train, replace_norm])
def test_folds_again_when_something_changes(change, device):
    x = torch.randn(2, 12, 9, 9, device=device)
    module = build(device=device, padding=1, activation="none")
    for strategy in module.strategies(x):
        module.strategy = strategy
        with torch.no_grad():
            before = module(x)
        change(module)
        with torch.no_grad():
            assert not torch.allclose(module(x), before)
            torch.testing.assert_close(module(x), module.reference(x), atol=1e-4, rtol=1e-4)


def test_named_classes(device):
    x = torch.randn(2, 4, 9, 9, device=device)
    for kind, function in (
        (FusedConv2dBN, lambda y: y),
        (FusedConv2dBNReLU, torch.relu),
        (FusedConv2dBNReLU6, nn.functional.relu6),
        (FusedConv2dBNSiLU, nn.functional.silu),
        (FusedConv2dBNHardswish, nn.functional.hardswish),
    ):
        conv, bn = nn.Conv2d(4, 8, 3, device=device).eval(), nn.BatchNorm2d(8, device=device).eval()
        with torch.no_grad():
            torch.testing.assert_close(kind(conv, bn)(x), function(bn(conv(x))))
    assert FusedConv1dBNReLU(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8)).activation == "relu"
    assert "activation='relu'" in repr(FusedConv3dBNReLU(nn.Conv3d(4, 8, 3), nn.BatchNorm3d(8)))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: FusedConvBN(nn.Conv2d(4, 4, 1), None, "mish"), ValueError, "unknown activation 'mish'"),
        (lambda: FusedConvBN(nn.Linear(4, 4)), TypeError, "expected an nn.Conv1d"),
        (lambda: FusedConvBN(nn.ConvTranspose2d(4, 4, 1)), TypeError, "expected an nn.Conv1d"),
        (lambda: FusedConvBN(nn.LazyConv2d(4, 1)), TypeError, "not initialized"),
        (lambda: FusedConvBN(nn.Conv2d(4, 4, 1), nn.LazyBatchNorm2d()), TypeError, "not initialized"),
        (lambda: FusedConvBN(nn.Conv2d(4, 4, 1), nn.BatchNorm1d(4)), TypeError, "expected an nn.BatchNorm2d"),
        (lambda: FusedConvBN(nn.Conv2d(4, 4, 1), nn.InstanceNorm2d(4)), TypeError, "expected an nn.BatchNorm2d"),
        (lambda: FusedConvBN(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(8)), ValueError, "4 output channels"),
        (lambda: FusedConvBN(nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 1))), ValueError, "is parametrized"),
        (lambda: FusedConv2dBNReLU(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)), TypeError, "expected an nn.Conv2d"),
        (lambda: FusedConv2dBNReLU(nn.Conv2d(4, 4, 1))(torch.empty(4, 9, 9)), ValueError, "4 dimensions"),
    ],
)
def test_errors_are_one_clear_line(make, error, words):
    with pytest.raises(error, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [(1, 16, 9, 9), (2, 16, 8, 9), (2, 15, 9, 9)], ids=str)
def test_residual_of_another_shape_is_refused(shape, device):
    module, x = build(device=device, padding=1), torch.randn(2, 12, 9, 9, device=device)
    for module.strategy in module.strategies(x):
        with torch.no_grad(), pytest.raises(ValueError, match="residual must have"):
            module(x, torch.randn(shape, device=device))
        with torch.no_grad(), pytest.raises(ValueError, match="residual must have"):
            module(x, torch.randn(2, 16, 9, 9, device=device, dtype=torch.float64))


@pytest.mark.parametrize(
    ("gain", "variance", "inputs"), [(1e-5, 1, 3e3), (6e4, 6e-5, 1e-3)], ids=["too small", "too large"]
)
@pytest.mark.parametrize("gradients", [False, True])
def test_folded_weights_beyond_the_range_of_float16(gain, variance, inputs, gradients, device):
    """The weights that are folded lie within it, and so does the result."""
    module = build(dtype=torch.float16, device=device, activation="none")
    with torch.no_grad():
        module.bn.weight.fill_(gain), module.bn.running_var.fill_(variance)
        module.bn.bias.zero_(), module.bn.running_mean.zero_(), module.conv.bias.zero_()
        x = (torch.randn(2, 12, 9, 9, device=device) * inputs).half()
        exact = copy.deepcopy(module).double().reference(x.double())
    with torch.set_grad_enabled(gradients):
        for module.strategy in module.strategies(x):
            error = (module(x).double() - exact).abs().max()
            assert error <= 2 * torch.finfo(torch.float16).eps * exact.abs().max()
