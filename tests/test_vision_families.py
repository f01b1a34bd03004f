"""Families of vision models, converted whole: which sites are found, and that the result is as accurate."""

import pytest
import torch
from support.selection import exhaustive
from torch import nn

from kfconvert import ModelConverter

torchvision = pytest.importorskip("torchvision")

# name -> (size of the images, fusions and the sites of each that must be applied)
TORCHVISION = {
    "alexnet": (64, {"conv_relu": 5, "linear_relu": 2}),
    "vgg11_bn": (32, {"conv_bn_relu": 8, "linear_relu": 2}),
    "squeezenet1_1": (64, {"conv_relu": 26}),
    "densenet121": (64, {"batchnorm_relu": 62, "conv_bn_relu": 59, "conv": 61}),
    "mobilenet_v3_small": (
        64,
        {"squeeze_excite": 9, "conv_bn_hardswish": 18, "conv_bn_relu": 5, "linear_hardswish": 1, "linear": 1},
    ),
    "efficientnet_b0": (64, {"squeeze_excite": 16, "conv_bn_silu": 33, "conv_bn_add": 9, "linear": 1}),
    "convnext_tiny": (64, {"linear_scale": 18, "linear_gelu": 18, "conv": 22}),
}


def trained(model: nn.Module, images: torch.Tensor) -> nn.Module:
    """Batch statistics that are not 0 and 1, layer scales that are not nearly 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gamma", "layer_scale")):
                parameter.uniform_(0.5, 1.5)
        model.train()(images)
    return model.eval()


def check(model: nn.Module, size: int, expected: dict[str, int]) -> None:
    model = trained(model, torch.randn(4, 3, size, size))
    converter = ModelConverter(select="all")
    converted = converter.convert_model(model, input_shape=(2, 3, size, size))
    stats = converter.conversion_stats
    assert stats["accuracy"]["passed"]
    assert {name: stats[f"{name}_replaced"] for name in expected} == expected
    images = torch.randn(3, 3, size, size)
    with torch.no_grad():
        torch.testing.assert_close(converted(images), model(images), rtol=1e-4, atol=1e-4)
    assert converted.kfconvert_info()["guard"]["misses"] == {}


SHORT = "mobilenet_v3_small"


@pytest.mark.parametrize("name", [SHORT, *exhaustive(*(name for name in TORCHVISION if name != SHORT))])
def test_torchvision(name):
    size, expected = TORCHVISION[name]
    check(torchvision.models.get_model(name, weights=None), size, expected)


# Small models of the families' own classes; their stochastic depth is gone in eval.


@pytest.mark.exhaustive
def test_timm_convnext():
    convnext = pytest.importorskip("timm.models.convnext")
    model = convnext.ConvNeXt(depths=(1, 1, 2, 1), dims=(16, 24, 32, 48), drop_path_rate=0.5)
    check(model, 64, {"linear_scale": 5, "linear_gelu": 5, "conv": 9})


def test_timm_vision_transformer_with_layer_scale():
    vision_transformer = pytest.importorskip("timm.models.vision_transformer")
    model = vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, init_values=0.1, drop_path_rate=0.5
    )
    check(model, 32, {"linear_scale": 4, "linear_gelu": 2, "conv": 1})


@pytest.mark.exhaustive
def test_timm_regnet():
    timm = pytest.importorskip("timm")
    check(timm.create_model("regnety_002"), 64, {"squeeze_excite": 13})
