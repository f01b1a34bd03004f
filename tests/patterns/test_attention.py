"""The pattern ``attention`` in transformers, timm and torchvision: found, accurate, the same rows hidden."""

import pytest
import timm
import torch
import torchvision
import transformers as hf
from support.selection import each_once, exhaustive
from torch import nn

from kfconvert import ModelConverter
from kfconvert.canonical.passes import canonicalise
from kfconvert.capture.tracer import trace
from kfconvert.graph.nodes import mark_weights
from kfconvert.inputs.example import ExampleCall
from kfconvert.matching.matcher import find
from kfconvert.patterns import REGISTRY

PATTERNS = [pattern for pattern in REGISTRY if pattern.name == "attention"]
# bfloat16 is fused on CUDA only: see FusedAttention.strategies.
KINDS = [pytest.param(("cpu", torch.float32), id="cpu-float32")]
for dtype in (torch.float32, torch.bfloat16):
    KINDS.append(pytest.param(("cuda", dtype), marks=pytest.mark.cuda, id=f"cuda-{dtype}"))
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
SEQUENCE = {**SIZES, "max_position_embeddings": 32}
GPT2 = hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=32)
T5 = hf.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
BLOOM = hf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
DEBERTA = hf.DebertaV2Config(**SEQUENCE, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"])
SWIN = hf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2], num_heads=[2], window_size=4)
RESNET = hf.ResNetConfig(embedding_size=8, hidden_sizes=[8] * 4, depths=[1] * 4, out_features=["stage4"])
DETR = hf.DetrConfig(
    use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=RESNET, d_model=32,
    encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=64,
    decoder_ffn_dim=64, num_queries=5,
)  # fmt: skip


def ids():
    return torch.randint(3, 60, (2, 12))


def tokens(**options):
    """Token ids, and a mask that hides the end of one row."""
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, 8:] = 0
    return {"input_ids": ids(), "attention_mask": mask, **options}


def image(size=32):
    return {"pixel_values": torch.randn(2, 3, size, size)}


def without_cache():
    return tokens(use_cache=False)


# name -> (model, its configuration, inputs, how many sites)
MODELS = {
    "bert": (hf.BertModel, hf.BertConfig(**SEQUENCE), tokens, 1),
    "gpt2": (hf.GPT2Model, GPT2, without_cache, 1),
    "t5": (hf.T5Model, T5, lambda: tokens(decoder_input_ids=ids(), use_cache=False), 3),
    "bloom": (hf.BloomModel, BLOOM, without_cache, 1),
    "llama": (hf.LlamaModel, hf.LlamaConfig(**SEQUENCE, num_key_value_heads=2), without_cache, 1),
    "deberta": (hf.DebertaV2Model, DEBERTA, tokens, 1),
    "swin": (hf.SwinModel, SWIN, image, 2),
    "detr": (hf.DetrModel, DETR, lambda: image(64), 3),
}


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def build(name, dtype, device="cpu"):
    torch.manual_seed(0)
    cls, config, inputs, count = MODELS[name]
    config._attn_implementation = "eager"
    call = {key: moved(value, dtype, device) if torch.is_tensor(value) else value for key, value in inputs().items()}
    return cls(config).eval().to(device, dtype), call, count


def moved(tensor, dtype, device):
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)


def findings(model, call):
    region = trace(model.eval(), call)
    mark_weights(region.graph, (*region.slots, *region.constants))
    canonicalise(region.graph)
    return find(region.graph, PATTERNS)


def converted(model, call):
    """The model with every attention site fused that is accurate, and its statistics."""
    converter = ModelConverter(select="all", effort="fast")
    fused = converter.convert_model(model, example_inputs=call)
    return fused, converter.conversion_stats


@pytest.mark.parametrize("name", MODELS)
def test_sites_in_transformers(name):
    model, call, count = build(name, torch.float32)
    assert len(findings(model, ExampleCall((), call)).matches) == count


@pytest.mark.parametrize("name", ["bloom", "swin", *exhaustive("bert", "t5", "llama")])
def test_converted_is_as_accurate(name, kind):
    device, dtype = kind
    model, call, count = build(name, dtype, device)
    fused, stats = converted(model, call)
    assert stats["attention_replaced"] == count and stats["accuracy"]["passed"]
    with torch.no_grad():
        torch.testing.assert_close(fused(**call)[0], model(**call)[0], rtol=5e-2, atol=8 * torch.finfo(dtype).eps)
    assert fused.kfconvert_info()["guard"]["misses"] == {}


@pytest.mark.parametrize("name", ["bert", "t5", *exhaustive("deberta")])
def test_a_row_that_sees_nothing_is_as_in_the_original(name, kind):
    device, dtype = kind
    model, call, count = build(name, dtype, device)
    fused, stats = converted(model, call)
    assert stats["attention_replaced"] == count
    call["attention_mask"][0] = 0
    with torch.no_grad():
        torch.testing.assert_close(fused(**call)[0], model(**call)[0], rtol=5e-2, atol=8 * torch.finfo(dtype).eps)


def test_bfloat16_on_the_cpu_is_left_alone():
    model, call, _ = build("bert", torch.bfloat16)
    _, stats = converted(model, call)
    assert stats["attention_found"] == 1 and stats["attention_replaced"] == 0


def test_half_with_padding_is_refused():
    model, call, _ = build("bert", torch.float16)
    found = findings(model, ExampleCall((), call))
    assert not found.matches and "float16" in found.near_misses[0].reason


def windowed(dtype, device="cpu"):
    """Windows, shifted in one of two blocks, with a learned bias of relative positions."""
    model = torchvision.models.SwinTransformer(
        patch_size=[4, 4], embed_dim=32, depths=[2], num_heads=[2], window_size=[4, 4], num_classes=4
    )
    return model.eval().to(device, dtype), torch.randn(2, 3, 32, 32, device=device, dtype=dtype)


def test_half_with_a_learned_bias_and_shifted_windows_is_found():
    _, stats = converted(*windowed(torch.float16))
    assert stats["attention_found"] == 2 and not [n for n in stats["near_misses"] if n["pattern"] == "attention"]


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shifted_windows_in_half_types(dtype):
    model, x = windowed(dtype, "cuda")
    fused, stats = converted(model, x)
    assert stats["attention_replaced"] == 2 and stats["accuracy"]["passed"]
    with torch.no_grad():
        torch.testing.assert_close(fused(x), model(x), rtol=5e-2, atol=8 * torch.finfo(dtype).eps)


def test_requested_weights_are_kept():
    model, call, _ = build("bert", torch.float32)
    found = findings(model, ExampleCall((), {**call, "output_attentions": True}))
    assert not found.matches and "also used by the model's output" in found.near_misses[0].reason


@pytest.fixture
def spelled_out_timm():
    """timm without scaled_dot_product_attention."""
    before = timm.layers.use_fused_attn()
    timm.layers.set_fused_attn(False)
    yield
    timm.layers.set_fused_attn(before)


def test_timm(spelled_out_timm, kind):
    device, dtype = kind
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5
    )
    _, stats = converted(model.to(device, dtype), (torch.randn(2, 3, 32, 32, device=device, dtype=dtype),))
    assert stats["attention_replaced"] == 2 and stats["accuracy"]["passed"]


class SelfAttention(nn.Module):
    def __init__(self, need_weights, keep):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.need_weights, self.keep = need_weights, keep

    def forward(self, x, padding=None):
        y, weights = self.attention(x, x, x, key_padding_mask=padding, need_weights=self.need_weights)
        return (y, weights) if self.keep else y


@pytest.mark.parametrize("need_weights, keep, count", [(True, False, 1), (True, True, 0), (False, False, 0)])
def test_multihead_attention(need_weights, keep, count):
    x = torch.randn(2, 5, 32)
    assert len(findings(SelfAttention(need_weights, keep), ExampleCall((x,))).matches) == count


def test_rows_without_keys_are_nan_as_in_the_original(kind):
    """The padding mask of ``nn.MultiheadAttention`` is -inf."""
    device, dtype = kind
    torch.manual_seed(0)
    x, padding = torch.randn(2, 5, 32, device=device, dtype=dtype), torch.zeros(2, 5, dtype=torch.bool, device=device)
    padding[0, 3:] = True
    model = SelfAttention(True, False).eval().to(device, dtype)
    fused, stats = converted(model, (x, padding))
    assert stats["attention_replaced"] == 1 and stats["accuracy"]["passed"]
    padding[1] = True
    with torch.no_grad():
        expected = model(x, padding)
        assert expected[1].isnan().all() and expected[0].isfinite().all()
        atol = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(fused(x, padding), expected, equal_nan=True, rtol=5e-2, atol=atol)
    assert fused.kfconvert_info()["guard"]["misses"] == {}


class Buffered(nn.Module):
    """Attention with an additive mask, a buffer or a parameter or a plain attribute, that is written later."""

    def __init__(self, kind):
        super().__init__()
        mask = torch.zeros(5, 5)
        if kind == "buffer":
            self.register_buffer("mask", mask)
        else:
            self.mask = nn.Parameter(mask) if kind == "parameter" else mask

    def forward(self, x):
        return torch.softmax(x @ x.transpose(-1, -2) * 0.5 + self.mask, -1) @ x


@each_once(kind=["buffer", "parameter", "attribute"], value=[float("-inf"), torch.finfo(torch.float32).min, -1e9])
def test_a_mask_that_is_written_after_the_conversion(kind, value):
    torch.manual_seed(0)
    model, x = Buffered(kind).eval(), torch.randn(2, 3, 5, 8)
    fused, stats = converted(model, (x,))
    assert stats["attention_replaced"] == 1
    with torch.no_grad():
        for module in (model, fused):
            module.mask[1] = value
            module.mask[2, 3:] = value
        torch.testing.assert_close(fused(x), model(x), equal_nan=True)
