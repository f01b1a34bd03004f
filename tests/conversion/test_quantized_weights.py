"""Weights that wrap other tensors, as quantized weights do: programs compute with the inner tensors."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kfconvert
from kfconvert import ModelConverter
from kfconvert.runtime import guarded_forward

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
aten = torch.ops.aten


class Rows(Tensor):
    """A weight with a scale for each row of integers. ``sign`` is metadata."""

    @staticmethod
    def __new__(cls, numbers, scale, sign=1):
        return Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)

    def __init__(self, numbers, scale, sign=1):
        self.numbers, self.scale, self.sign = numbers, scale, sign

    @classmethod
    def of(cls, weight, sign=1):
        scale = weight.detach().abs().amax(1) / 127
        return cls((weight.detach() / scale[:, None]).round().to(torch.int8), scale, sign)

    def __tensor_flatten__(self):
        return ["numbers", "scale"], {"sign": self.sign}

    @classmethod
    def __tensor_unflatten__(cls, inner, metadata, size, stride):
        return cls(inner["numbers"], inner["scale"], metadata["sign"])

    def dequantize(self):
        return self.numbers.to(self.scale.dtype) * self.scale[:, None] * self.sign

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is F.linear:
            x, weight, bias = (*args, *(kwargs or {}).values(), None)[:3]
            y = F.linear(x, weight.numbers.to(x.dtype)) * (weight.scale * weight.sign)
            return y if bias is None else y + bias
        return super().__torch_function__(function, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is aten.copy_.default:
            args[0].numbers.copy_(args[1].numbers)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        if function in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(function(args[0].numbers), function(args[0].scale), args[0].sign)
        raise NotImplementedError(function)


def quantized(weight, sign=1):
    return nn.Parameter(Rows.of(weight, sign), requires_grad=False)


def net(layers=1):
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16)) for _ in range(layers))
    )
    for block in model:
        block[1].weight = quantized(block[1].weight)
    return model.eval()


def converted(model, **options):
    converter = ModelConverter(select="all", effort="fast", **options)
    return converter.convert_model(model, example_inputs=X), converter.conversion_stats


def same(fused, model):
    with torch.no_grad():
        torch.testing.assert_close(fused(X), model(X), rtol=1e-4, atol=1e-4)


def misses(fused):
    return fused.kfconvert_info()["guard"]["misses"]


def test_the_graph_reads_the_inner_tensors():
    model = net()
    fused, stats = converted(model)
    assert stats["total_replaced"] and stats["regions"][0]["captured"]
    assert stats["accuracy"]["reference"].startswith("float64 run of the original with dequantized weights")
    (variant,) = guarded_forward(fused).variants
    assert sorted(variant.region.inner.values()) == [("numbers",), ("scale",)]
    same(fused, model)
    assert not misses(fused)


def copy_in_place(weight, new):
    weight.copy_(new)


def write_inner(weight, new):
    weight.numbers.copy_(new.numbers)
    weight.scale.copy_(new.scale)


def assign_inner(weight, new):
    weight.numbers, weight.scale = new.numbers, new.scale


def swap(weight, new):
    torch.utils.swap_tensors(weight, new)


@torch.no_grad()
@pytest.mark.parametrize("write", [copy_in_place, write_inner, assign_inner, swap])
def test_follows_changes_of_a_weight(write):
    model = net()
    fused, _ = converted(model)
    before = fused(X)
    for each in (model, fused):
        write(each[0][1].weight, quantized(torch.linspace(-1, 2, 256).reshape(16, 16)))
    same(fused, model)
    assert not torch.equal(fused(X), before) and not misses(fused)


def test_follows_another_weight():
    model = net()
    fused, _ = converted(model)
    for each in (model, fused):
        each[0][1].weight = quantized(torch.ones(16, 16).tril())
    same(fused, model)
    same(copy.deepcopy(fused), model)
    assert not misses(fused)


@pytest.mark.parametrize("kind", ["metadata", "class", "attribute"])
def test_another_kind_of_weight_is_a_miss(kind):
    model = net()
    fused, _ = converted(model)
    same(fused, model)
    for each in (model, fused):
        linear, weight = each[0][1], torch.ones(16, 16).tril()
        if kind == "attribute":
            linear.weight.sign = -1
        elif kind == "class":
            linear.weight = nn.Parameter(weight)
        else:
            linear.weight = quantized(weight, -1)
    with pytest.warns(RuntimeWarning, match="a distributed or quantized weight was replaced"):
        same(fused, model)
    assert misses(fused)


def test_alike_layers_have_weights_of_one_kind():
    model = net(8)
    model[6][1].weight = quantized(model[6][1].weight.dequantize(), -1)
    fused, stats = converted(model)
    assert stats["total_replaced"] == 16
    same(fused, model)


def test_unsupported_uses_are_refused(tmp_path):
    model = net()
    fused, _ = converted(model)
    with pytest.raises(kfconvert.ArtifactError, match="is a Rows, not a plain tensor"):
        kfconvert.save(fused, tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        _, stats = converted(net())
    assert "distributed or quantized weights, which are not converted under autocast" in stats["regions"][0]["reason"]


class Heads(nn.Module):
    """A projection with numbers that all heads share, between fused layers."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)
        self.register_buffer("numbers", torch.randint(-127, 127, (8, 8), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(8) / 100)

    def forward(self, x):
        h = F.gelu(self.first(x))
        product = torch.mm(h.reshape(-1, 8), self.numbers.t().to(h.dtype)) * self.scale
        return self.last(product.reshape(h.shape))


def test_a_product_with_each_head_is_no_linear_layer():
    torch.manual_seed(0)
    model = Heads().eval()
    fused, stats = converted(model)
    assert stats["regions"][0]["captured"] and stats["linear_gelu_replaced"] == 1
    torch.testing.assert_close(fused(X), model(X))
