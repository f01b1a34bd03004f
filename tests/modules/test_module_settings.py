"""Fused modules with settings far from the usual ones compute what torch's modules with these settings do."""

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from every_module import CLASSES
from torch import nn

from kfconvert.modules import (
    FusedAttention,
    FusedBatchNormAct,
    FusedConvBN,
    FusedDecodeAttention,
    FusedGatedLinear,
    FusedGatedQuantizedLinear,
    FusedGroupNorm,
    FusedLayerNorm,
    FusedLinear,
    FusedLinearScale,
    FusedMergedLinear,
    FusedMergedQuantizedLinear,
    FusedNormLinear,
    FusedQuantizedLinear,
    FusedRMSNorm,
    FusedRotary,
    FusedSelfAttention,
    FusedSqueezeExcite,
)
from kfconvert.ops import apply_activation

EPS, SLOPE, OFFSET = 0.3, 0.2, 1.5
# These have none of the settings that change a result.
WITHOUT = (
    FusedAttention,
    FusedDecodeAttention,
    FusedLinearScale,
    FusedMergedLinear,
    FusedRotary,
    FusedSelfAttention,
    FusedSqueezeExcite,
)
x = torch.randn(3, 8, 9, 9)


def made(fused, plain, *inputs):
    return SimpleNamespace(fused=fused, plain=plain, inputs=inputs)


def activated(cls, y):
    """With the activation of ``cls``; the settings below choose leaky ReLU where there is a choice."""
    choice = "negative_slope" in inspect.signature(cls).parameters
    return apply_activation(y, "leaky_relu" if choice else cls.default_activation, SLOPE)


def chosen(cls):
    parameters = inspect.signature(cls).parameters
    return {"activation": "leaky_relu", "negative_slope": SLOPE} if "negative_slope" in parameters else {}


def normed(cls, definition, fused):
    """A norm of rows, of a sum where ``cls`` adds a residual."""
    if "return_sum" not in vars(fused):
        return made(fused, lambda x: activated(cls, definition(x)), torch.randn(5, 16))
    return made(fused, lambda x, r: activated(cls, definition(x + r)), torch.randn(5, 16), torch.randn(5, 16))


def layer_norm(cls):
    norm = nn.LayerNorm(16, EPS)
    for fused in (cls.from_tensors((16,), norm.weight, norm.bias, EPS), cls(16, EPS)):
        yield normed(cls, lambda x, fused=fused: F.layer_norm(x, (16,), fused.weight, fused.bias, EPS), fused)


def rms_norm(cls):
    for fused in (cls.from_tensors((16,), nn.RMSNorm(16).weight, EPS), cls(16, EPS), cls(16, EPS, offset=OFFSET)):
        offset = OFFSET if fused.offset else 0
        yield normed(cls, lambda x, f=fused, o=offset: F.rms_norm(x, (16,), o + f.weight, EPS), fused)


def group_norm(cls):
    for norm in (nn.GroupNorm(2, 8, EPS), nn.GroupNorm(4, 8, EPS, affine=False)):
        yield made(cls(norm, **chosen(cls)), lambda x, norm=norm: activated(cls, norm(x)), x)


def batch_norm(cls):
    for norm in (nn.BatchNorm2d(8, EPS), nn.BatchNorm2d(8, EPS, affine=False)):
        yield made(cls(norm, **chosen(cls)), lambda x, norm=norm: activated(cls, norm(x)), x)


def convolution(cls):
    dimensions = getattr(cls, "dimensions", 2)
    kind, norm = (getattr(nn, f"{name}{dimensions}d") for name in ("Conv", "BatchNorm"))
    image = torch.randn(3, 8, *[9] * dimensions)
    for options in (
        {"stride": 2, "padding": 1},
        {"dilation": 2, "groups": 4, "bias": False},
        {"padding": 2, "padding_mode": "reflect"},
    ):
        for affine in (True, False):
            pair = nn.Sequential(kind(8, 8, 3, **options), norm(8, EPS, affine=affine))
            yield made(cls(*pair, **chosen(cls)), lambda x, pair=pair: activated(cls, pair(x)), image)


def linear(cls):
    for bias in (True, False):
        layer = nn.Linear(16, 8, bias)
        fused = cls.from_linear(layer, **chosen(cls))
        yield made(fused, lambda x, layer=layer: activated(cls, layer(x)), torch.randn(5, 16))


def norm_linear(cls):
    norm, layer = FusedRMSNorm(16, EPS, offset=OFFSET), nn.Linear(16, 8)
    fused = cls(norm, FusedLinear.from_linear(layer, "leaky_relu", SLOPE))

    def plain(x):
        return F.leaky_relu(layer(F.rms_norm(x, (16,), OFFSET + norm.weight, EPS)), SLOPE)

    yield made(fused, plain, torch.randn(5, 16))
    shifted, layer = FusedLayerNorm(16, EPS), nn.Linear(16, 8)
    fused = cls(shifted, FusedLinear.from_linear(layer, "leaky_relu", SLOPE))

    def centered(x):
        return F.leaky_relu(layer(F.layer_norm(x, (16,), shifted.weight, shifted.bias, EPS)), SLOPE)

    yield made(fused, centered, torch.randn(5, 16))


def quantized(cls):
    numbers = torch.randint(-3, 4, (8, 16), dtype=torch.int8)
    for scales_weight in (False, True):
        fused = cls.from_tensors(numbers, nn.Parameter(torch.ones(8, 1)), scales_weight)
        yield made(fused, lambda x, fused=fused: F.linear(x, numbers * fused.scale), torch.randn(5, 16))


def quantized_layers(count):
    numbers = [torch.randint(-3, 4, (8, 16), dtype=torch.int8) for _ in range(count)]
    fused = [FusedQuantizedLinear.from_tensors(each, nn.Parameter(torch.ones(8, 1))) for each in numbers]
    return fused, [lambda x, q=q, each=each: F.linear(x, q * each.scale) for q, each in zip(numbers, fused)]


def quantized_merged(cls):
    fused, plain = quantized_layers(3)
    yield made(cls(*fused), lambda x: tuple(each(x) for each in plain), torch.randn(5, 16))


def quantized_gated(cls):
    fused, (gate, up) = quantized_layers(2)
    yield made(cls(*fused, **chosen(cls)), lambda x: activated(cls, gate(x)) * up(x), torch.randn(5, 16))


def gated(cls):
    gate, up = nn.Linear(16, 8), nn.Linear(16, 8)
    yield made(cls(gate, up, **chosen(cls)), lambda x: activated(cls, gate(x)) * up(x), torch.randn(5, 16))


MAKERS = {
    FusedBatchNormAct: batch_norm,
    FusedConvBN: convolution,
    FusedGatedLinear: gated,
    FusedGroupNorm: group_norm,
    FusedLayerNorm: layer_norm,
    FusedLinear: linear,
    FusedNormLinear: norm_linear,
    FusedMergedQuantizedLinear: quantized_merged,
    FusedGatedQuantizedLinear: quantized_gated,
    FusedQuantizedLinear: quantized,
    FusedRMSNorm: rms_norm,
}


@pytest.mark.parametrize(
    "cls",
    [cls for cls in CLASSES if cls not in WITHOUT and not cls.__name__.startswith("FusedConv2d")],
    ids=lambda cls: cls.__name__,
)
def test_every_strategy_knows_the_settings(cls):
    (make,) = (make for base, make in MAKERS.items() if issubclass(cls, base))
    for case in make(cls):
        fused = case.fused.eval()
        with torch.no_grad():
            for tensor in (*fused.parameters(), *fused.buffers()):
                if tensor.is_floating_point():
                    tensor.uniform_(0.5, 2)
            expected = case.plain(*case.inputs)
            for fused.strategy in fused.strategies(*case.inputs):
                torch.testing.assert_close(fused(*case.inputs), expected, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(fused.plan(*case.inputs)(*case.inputs), expected, rtol=1e-4, atol=1e-5)
            for fused.strategy in fused.strategies(*case.inputs):
                for parameter in fused.parameters():
                    parameter.data.mul_(0.75)  # leaves no trace
                fused.clear_derived()
                expected = case.plain(*case.inputs)
                torch.testing.assert_close(fused(*case.inputs), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fused(*case.inputs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("features", [(16, 8), (3, 5), (0, 4)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_linear_layer_starts_as_that_of_torch(features, bias):
    layers = []
    for cls in (nn.Linear, FusedLinear):
        torch.manual_seed(1)
        layers.append(dict(cls(*features, bias).named_parameters()))
    torch.testing.assert_close(*layers, rtol=0, atol=0)


SETTINGS = {
    "eps": lambda: (FusedConvBN(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), "leaky_relu"), "bn", "eps", 1.0),
    "activation": lambda: (FusedConvBN(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), "relu"), "", "activation", "silu"),
    "slope": lambda: (FusedConvBN(nn.Conv2d(8, 8, 3), None, "leaky_relu"), "", "negative_slope", 0.5),
    "stride": lambda: (FusedConvBN(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)), "conv", "stride", (2, 2)),
    "padding": lambda: (FusedConvBN(nn.Conv2d(8, 8, 3, padding=1)), "conv", "padding_mode", "circular"),
    "batch norm": lambda: (FusedBatchNormAct(nn.BatchNorm2d(8)), "bn", "eps", 1.0),
    "linear": lambda: (FusedLinear(9, 9, activation="relu"), "", "activation", "tanh"),
    "group norm": lambda: (FusedGroupNorm(nn.GroupNorm(2, 8), "relu"), "", "activation", "silu"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_assigned_after_a_call(name):
    module, path, setting, value = SETTINGS[name]()
    module.eval()
    for strategy in module.strategies(x):
        module.strategy = strategy
        with torch.no_grad():
            module(x)
            before = getattr(module.get_submodule(path), setting)
            setattr(module.get_submodule(path), setting, value)
            torch.testing.assert_close(module(x), module.reference(x))
            setattr(module.get_submodule(path), setting, before)
            torch.testing.assert_close(module(x), module.reference(x))
