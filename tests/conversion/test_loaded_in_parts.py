"""Checkpoints in several files, and models that accelerate divides: converted, or refused in one line."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kfconvert import ConversionError, ModelConverter

IDS = torch.arange(1, 9)[None]


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, pad_token_id=0))
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def test_several_files(checkpoint):
    pytest.importorskip("accelerate")
    assert len([*checkpoint.glob("*.safetensors")]) > 2
    model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map="cpu").eval()
    fused = ModelConverter(select="all", effort="fast", new_tokens=0).convert_model(model, input_shape=(1, 8))
    tokens = [each.generate(IDS, max_new_tokens=4, do_sample=False) for each in (fused, model)]
    assert torch.equal(*tokens) and not fused.kfconvert_info()["guard"]["misses"]


def test_offloaded_weights(checkpoint, tmp_path):
    pytest.importorskip("accelerate")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"}
    places |= {"model.norm": "cpu", "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map=places, offload_folder=tmp_path).eval()
    with pytest.raises(ConversionError, match="^the model has tensors without data, .*: load the model without off"):
        ModelConverter().convert_model(model, input_shape=(1, 8))


def test_hooks_of_accelerate(checkpoint):
    """The ``to`` of a copy of such a model moves the original."""
    accelerate = pytest.importorskip("accelerate")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    expected = model(IDS).logits
    accelerate.dispatch_model(model, {"model": "cpu", "lm_head": "cpu"}, force_hooks=True)
    fused = ModelConverter(effort="fast", new_tokens=0).convert_model(model, input_shape=(1, 8))
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model(IDS).logits, expected) and torch.equal(fused(IDS).logits, expected)


def test_weights_that_are_not_loaded():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ConversionError, match="^the model has tensors without data, on the device meta: load its w"):
        ModelConverter().convert_model(model, input_shape=(1, 4))


@pytest.mark.cuda
def test_several_devices():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).cuda()).eval()
    with pytest.raises(ConversionError, match=r"^the model has parameters on several devices \(cpu, cuda:0\)"):
        ModelConverter().convert_model(model, input_shape=(1, 4))
    fused = ModelConverter(select="all").convert_model(model, input_shape=(1, 4), device="cuda")
    assert fused(torch.randn(1, 4, device="cuda")).shape == (1, 4)
