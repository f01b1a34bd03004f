"""Gated MLPs, quick GELU and merged projections in the modules that Hugging Face and timm models are made of."""

import importlib

import pytest
import torch
from support.selection import exhaustive
from torch import nn

from kfconvert import ModelConverter

HIDDEN, INNER = 32, 48


def hugging_face(family, module, config, *extra, **options):
    """The module of a transformers family, of random weights; skipped in a transformers without that family."""

    def make():
        pytest.importorskip("transformers")
        modeling = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
        sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, **options}
        return getattr(modeling, module)(getattr(configuration, config)(**sizes), *extra)

    return make


def timm(name, **options):
    return lambda: getattr(pytest.importorskip("timm.layers"), name)(HIDDEN, INNER, **options)


T5 = {"d_model": HIDDEN, "d_ff": INNER, "feed_forward_proj": "gated-gelu"}
FAMILIES = {
    "t5": (hugging_face("t5", "T5DenseGatedActDense", "T5Config", **T5), "gated_linear_gelu_tanh"),
    "llama": (hugging_face("llama", "LlamaMLP", "LlamaConfig"), "gated_linear_silu"),
    "gemma2": (hugging_face("gemma2", "Gemma2MLP", "Gemma2Config"), "gated_linear_gelu_tanh"),
    "phi3": (hugging_face("phi3", "Phi3MLP", "Phi3Config", pad_token_id=0), "packed_gated_linear_silu"),
    "modernbert": (hugging_face("modernbert", "ModernBertMLP", "ModernBertConfig"), "packed_gated_linear_gelu"),
    "clip": (hugging_face("clip", "CLIPMLP", "CLIPTextConfig"), "linear_quick_gelu"),
    "GluMlp": (timm("GluMlp"), "packed_gated_linear_sigmoid"),
    "GluMlp_gelu": (timm("GluMlp", act_layer=nn.GELU, gate_last=False), "packed_gated_linear_gelu"),
    "SwiGLUPacked": (timm("SwiGLUPacked"), "packed_gated_linear_silu"),
}


def converted(model, *inputs):
    converter = ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(model.eval(), example_inputs=inputs)
    assert converter.conversion_stats["accuracy"]["passed"], converter.conversion_stats["accuracy"]
    return fused, converter.conversion_stats


def assert_follows(fused, model, inputs, dtype):
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    with torch.no_grad():
        got, want = fused(*inputs), model(*inputs)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert fused.kfconvert_info()["guard"]["misses"] == {}


SHORT = ["t5", "llama", "phi3", "clip", "GluMlp"]


@pytest.mark.parametrize("family", [*SHORT, *exhaustive(*(family for family in FAMILIES if family not in SHORT))])
def test_mlp(family):
    (make, pattern), (dtype, rows) = FAMILIES[family], (torch.bfloat16, 5) if family == "phi3" else (torch.float32, 40)
    model, x = make().to(dtype), torch.randn(2, rows, HIDDEN).to(dtype)
    fused, stats = converted(model, x)
    assert stats[f"{pattern}_found"] == stats[f"{pattern}_replaced"] == 1
    assert_follows(fused, model, (torch.randn(3, rows, HIDDEN).to(dtype),), dtype)
    weights = {name: torch.randn_like(tensor) / 8 for name, tensor in model.state_dict().items()}
    model.load_state_dict(weights), fused.load_state_dict(weights)
    assert_follows(fused, model, (x,), dtype)


class SelfGated(nn.Module):
    """One layer multiplied by a function of itself, which two products would compute twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, INNER)

    def forward(self, x):
        y = self.linear(x)
        return nn.functional.gelu(y) * y


def test_a_layer_that_gates_itself_is_computed_once():
    model, x = SelfGated(), torch.randn(3, HIDDEN)
    fused, stats = converted(model, x)
    assert stats["linear_replaced"] == stats["total_replaced"] == 1
    assert_follows(fused, model, (torch.randn(2, HIDDEN),), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, *exhaustive(torch.bfloat16)], ids=str)
def test_attention_of_bert(dtype):
    make = hugging_face("bert", "BertModel", "BertConfig", num_hidden_layers=2, num_attention_heads=4, vocab_size=99)
    model, ids = make().eval().to(dtype), torch.randint(99, (2, 9))
    fused, stats = converted(model, ids)
    assert stats["merged_linear_replaced"] == 2 and stats["linear_gelu_replaced"] == 2
    with torch.no_grad():
        got, want = fused(ids).last_hidden_state, model(ids).last_hidden_state
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-4 if dtype is torch.float32 else 6e-2)
        for each in (model, fused):
            query = each.encoder.layer[1].attention.self.query
            query.weight.mul_(2), query.bias.add_(0.5)
        changed = fused(ids).last_hidden_state
        torch.testing.assert_close(changed, model(ids).last_hidden_state, rtol=1e-2, atol=6e-2)
        assert not torch.equal(changed, got)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_mlp_on_cuda(family, dtype):
    make, pattern = FAMILIES[family]
    model, x = make().to("cuda", dtype), torch.randn(2, 40, HIDDEN, device="cuda", dtype=dtype)
    fused, stats = converted(model, x)
    assert stats[f"{pattern}_replaced"] == 1
    with torch.no_grad():
        tolerance = 1e-5 if dtype is torch.float32 else 3e-2
        torch.testing.assert_close(fused(x), model(x), rtol=tolerance, atol=tolerance)
