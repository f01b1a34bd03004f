"""Models that torchao has quantized, weights only."""

import copy
from collections import Counter

import pytest
import torch
from support.accuracy import assert_as_accurate
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import kfconvert
from kfconvert import ModelConverter
from kfconvert.capture.alike_layers import stacks_of

quantization = pytest.importorskip("torchao.quantization")

INT8 = quantization.Int8WeightOnlyConfig
FP8 = quantization.Float8WeightOnlyConfig


def int4():
    return quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=quantization.PerGroup(32))


def quantized_llama(config, dtype=torch.float32):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, **sizes)).eval().to(dtype)
    quantization.quantize_(model, config)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(INT8, id="int8"),
        pytest.param(FP8, id="fp8", marks=pytest.mark.exhaustive),
        pytest.param(int4, id="int4", marks=pytest.mark.exhaustive),
    ],
)
def test_a_decoder_is_captured_as_a_whole(config):
    model = quantized_llama(config())
    converter = ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(model, input_shape=(1, 16))
    stats = converter.conversion_stats
    assert all(region["captured"] and not region["module"] for region in stats["regions"])
    assert stats["add_rms_norm_replaced"] == 4 and stats["rotary_replaced"] == 4
    assert stats["accuracy"]["reference"].startswith("float64 run of the original") and stats["accuracy"]["ratio"] < 2
    ids = torch.randint(0, 128, (2, 7))
    torch.testing.assert_close(fused(ids).logits, model(ids).logits)
    tokens = [each.generate(ids, max_new_tokens=8, do_sample=False) for each in (fused, model)]
    assert torch.equal(*tokens)
    assert not fused.kfconvert_info()["guard"]["misses"]


@torch.no_grad()
def test_a_step_reads_the_weights_once():
    """On the CPU, by ATen's kernel for a few rows; a prompt casts the weights, as the original does."""
    model = quantized_llama(INT8(), torch.bfloat16)
    converter = ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(model, input_shape=(1, 16))
    stats = converter.conversion_stats
    kinds = ["gated_quantized_linear_silu", "merged_quantized_linear", "quantized_linear"]
    for sites, strategy in zip((stats["sites"], *stats["form_sites"]), (None, None, "int8pack"), strict=True):
        found = Counter((site["pattern"], site["strategy"]) for site in sites if site["pattern"] in kinds)
        assert found == {(kind, strategy): count for kind, count in zip(kinds, (2, 2, 5))}

    calls = []
    handle = model.register_forward_pre_hook(
        lambda _, args, given: calls.append(copy.deepcopy(given)), with_kwargs=True
    )
    model.generate(torch.arange(9)[None], max_new_tokens=2, do_sample=False)
    handle.remove()

    def step(model):
        return model(**copy.deepcopy(calls[1])).logits

    original, ours, truth = map(step, (model, fused, copy.deepcopy(model).double()))
    assert_as_accurate(ours, original, truth, ulps=(2, 1))
    assert not fused.kfconvert_info()["guard"]["misses"]


def test_alike_layers_are_traced_once():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=8, **sizes)).eval()
    quantization.quantize_(model, INT8())
    (stack,) = stacks_of(copy.deepcopy(model))
    assert stack.count == 8 and stack.traced == 3
    model.model.layers[7].mlp.up_proj.weight.block_size = [1, 16]
    assert not stacks_of(model)


class Net(nn.Module):
    """(..., 64) -> (..., 64)"""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.down = nn.LayerNorm(64), nn.Linear(64, 128, False), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(self.norm(x))))


def quantized_net(config):
    model = Net().eval()
    quantization.quantize_(model, config)
    return model


@torch.no_grad()
@pytest.mark.parametrize("config", [INT8, FP8, int4], ids=["int8", "fp8", "int4"])
def test_weights_are_read_in_each_call(config):
    x, model, other = torch.randn(3, 64), quantized_net(config()), quantized_net(config())
    fused = ModelConverter(select="all", effort="fast").convert_model(model, example_inputs=x)
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), model(x))
    fused.load_state_dict(other.state_dict())
    torch.testing.assert_close(fused(x), other(x))
    torch.testing.assert_close(kfconvert.export(fused, x).module()(x), other(x))
    assert not fused.kfconvert_info()["guard"]["misses"]


@pytest.mark.parametrize("config", [INT8, FP8], ids=["int8", "fp8"])
def test_scales_are_cast_once_and_weights_in_each_call(config):
    converter, model = ModelConverter(select="all", effort="fast"), Net().to(torch.bfloat16).eval()
    quantization.quantize_(model, config())
    converter.convert_model(model, example_inputs=torch.randn(3, 64, dtype=torch.bfloat16))
    assert converter.conversion_stats["memory"]["derived"] <= 2 * (128 + 64)
