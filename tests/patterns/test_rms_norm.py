"""RMS norms as transformers and timm write them: every one is found, and what comes out is as accurate."""

import copy
import importlib

import pytest
import torch
from support.selection import exhaustive
from torch import nn

from kfconvert import ModelConverter
from kfconvert.canonical.passes import canonicalise
from kfconvert.capture.tracer import trace
from kfconvert.graph.nodes import mark_weights
from kfconvert.inputs.example import ExampleCall
from kfconvert.matching.matcher import find
from kfconvert.modules import FusedRMSNorm
from kfconvert.patterns import REGISTRY

transformers = pytest.importorskip("transformers")
layers = pytest.importorskip("timm.layers")

DTYPES = [torch.float32, torch.bfloat16]
SIZE = 64


def in_transformers(model, name):
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


NORMS = {
    name: lambda model=model, name=name: in_transformers(model, name)(SIZE)
    for model, name in (
        ("t5", "T5LayerNorm"), ("llama", "LlamaRMSNorm"), ("mistral", "MistralRMSNorm"), ("qwen2", "Qwen2RMSNorm"),
        ("qwen3", "Qwen3RMSNorm"), ("gemma2", "Gemma2RMSNorm"), ("gemma3n", "Gemma3nRMSNorm"),
        ("olmo2", "Olmo2RMSNorm"),
    )
} | {
    "torch": lambda: nn.RMSNorm(SIZE),
    "timm": lambda: layers.RmsNorm(SIZE),
    "timm_fp32": lambda: layers.RmsNormFp32(SIZE),
}  # fmt: skip


def with_random_scales(model):
    """Fresh norms have weights of 1 (Gemma's of 0), which would hide a forgotten weight."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.25, 1.75)
    return model.eval()


def matches(model, x):
    region = trace(model, ExampleCall((x,)))
    mark_weights(region.graph, (*region.slots, *region.constants))
    canonicalise(region.graph)
    return find(region.graph, REGISTRY).matches


@pytest.mark.parametrize("dtype", [*DTYPES, *exhaustive(torch.float16)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_one_site_and_as_accurate(name, dtype):
    model = with_random_scales(NORMS[name]()).to(dtype)
    x = (torch.randn(3, 7, SIZE) * 3).to(dtype)
    (match,) = matches(model, x)
    fused = match.pattern.build(match, lambda node: model.weight).module
    assert type(fused) is FusedRMSNorm and fused.weight is model.weight
    assert fused.offset == (1.0 if name == "Gemma2RMSNorm" else 0.0)
    exact = copy.deepcopy(fused).double().reference(x.double())
    with torch.no_grad():
        outputs = fused(x), model(x)
    assert all(y.dtype is dtype for y in outputs)
    error, own = ((y.double() - exact).square().mean().sqrt() for y in outputs)
    # The half types are rounded once; in float32 it is the order of the sum that differs.
    assert error <= (1.5 if dtype is torch.float32 else 1.01) * own
    torch.testing.assert_close(*outputs)


TINY = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
# (configuration, its sizes, class, norms of 2 layers and the final one, how many of them read a residual sum)
MODELS = {"llama": ("LlamaConfig", TINY, "LlamaModel", 5, 4), "gemma2": ("Gemma2Config", TINY, "Gemma2Model", 9, 4)}


def tiny_model(name, dtype):
    configuration, sizes, model, norms, after_sums = MODELS[name]
    config = getattr(transformers, configuration)(**sizes)
    torch.manual_seed(0)
    return with_random_scales(getattr(transformers, model)(config)).to(dtype), norms, after_sums


@pytest.mark.parametrize("name", ["gemma2", *exhaustive("llama")])
@pytest.mark.parametrize("dtype", [torch.float32, *exhaustive(torch.bfloat16)], ids=str)
def test_every_norm_of_a_transformers_model_is_fused(name, dtype):
    model, norms, after_sums = tiny_model(name, dtype)
    ids = torch.randint(1, 128, (2, 10))
    converter = ModelConverter(select="all", effort="fast")
    converted = converter.convert_model(model, example_inputs={"input_ids": ids})
    stats = converter.conversion_stats
    assert stats["accuracy"]["passed"], stats["accuracy"]
    assert (stats["add_rms_norm_replaced"], stats["rms_norm_replaced"]) == (after_sums, norms - after_sums)
    with torch.no_grad():
        fused, own = (m(input_ids=ids).last_hidden_state.double() for m in (converted, model))
        exact = copy.deepcopy(model).double()(input_ids=ids).last_hidden_state
    assert converted.kfconvert_info()["guard"]["misses"] == {}
    error, allowed = ((y - exact).square().mean().sqrt() for y in (fused, own))
    assert error <= 1.5 * allowed


class Floats(nn.Module):
    def forward(self, x):
        return x.float()


def test_a_size_that_the_weight_fixes_is_fixed():
    model = with_random_scales(nn.Sequential(Floats(), NORMS["LlamaRMSNorm"]()))
    (match,) = matches(model, torch.ones(3, SIZE, dtype=torch.bool))  # of such tensors both sizes are traced free
    fused = match.pattern.build(match, lambda node: model[1].weight).module
    assert [type(size) for size in fused.normalized_shape] == [int]
