"""The rows of scripts/bench_rows.py: models with random weights, at the sizes that people run. No downloads."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from bench_models import LLAMA, build_case
from torch import Tensor, nn

Call = dict[str, Any]
DEVICE = "cuda"
TEN = (
    "bert-base resnet50 gpt2-lm vit_b_16 convnext_tiny mobilenet_v3_large efficientnet_b0 swin_t densenet121 llama-1.1b"
).split()


class Row(NamedTuple):
    """A model on the device in ``dtype``, and the keyword arguments of a call: ``make(dtype)``."""

    batch: int
    make: Callable[[torch.dtype], tuple[nn.Module, Call]]
    dtype: torch.dtype = torch.float16


def _case(name: str, batch: int, seq_len: int = 128) -> Row:
    def make(dtype: torch.dtype) -> tuple[nn.Module, Call]:
        case = build_case(name, batch, seq_len, torch.device(DEVICE), dtype)
        return case.model, dict(case.call.kwargs)

    return Row(batch, make)


def _row(batch: int, build: Callable[[int], tuple[nn.Module, Call]]) -> Row:
    def make(dtype: torch.dtype) -> tuple[nn.Module, Call]:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model, call = build(batch)
        kinds = {key: value.to(dtype) if _is_float(value) else value for key, value in call.items()}
        return model.eval().to(DEVICE, dtype), kinds

    return Row(batch, make)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Decoder(nn.Module):
    """The decoder of a VAE."""

    def __init__(self, vae: nn.Module):
        super().__init__()
        self.post_quant_conv, self.decoder = vae.post_quant_conv, vae.decoder

    def forward(self, latents: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(latents))


class Scores(nn.Module):
    """The scores of a segmentation model, which returns a dictionary."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)["out"]


def _vae(batch: int) -> tuple[nn.Module, Call]:
    import diffusers

    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[128, 256, 512, 512],
        layers_per_block=2,
        sample_size=512,
    )
    return Decoder(vae), {"latents": torch.randn(batch, 4, 64, 64)}


def _unet(batch: int) -> tuple[nn.Module, Call]:
    import diffusers

    unet = diffusers.UNet2DConditionModel(sample_size=64, cross_attention_dim=768, attention_head_dim=8)
    call = {"sample": torch.randn(batch, 4, 64, 64), "encoder_hidden_states": torch.randn(batch, 77, 768)}
    return unet, {**call, "timestep": torch.tensor(500), "return_dict": False}


def _sdxl(batch: int) -> tuple[nn.Module, Call]:
    """The U-Net of SDXL with four transformer blocks instead of ten at its lowest resolution."""
    import diffusers

    unet = diffusers.UNet2DConditionModel(
        sample_size=128,
        down_block_types=["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        up_block_types=["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        block_out_channels=[320, 640, 1280],
        transformer_layers_per_block=[1, 2, 4],
        cross_attention_dim=2048,
        attention_head_dim=[5, 10, 20],
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816,
    )
    call = {"sample": torch.randn(batch, 4, 128, 128), "encoder_hidden_states": torch.randn(batch, 77, 2048)}
    added = {"text_embeds": torch.randn(batch, 1280).half(), "time_ids": torch.randn(batch, 6).half()}
    return unet, {**call, "timestep": torch.tensor(500), "added_cond_kwargs": added, "return_dict": False}


def _dit(batch: int) -> tuple[nn.Module, Call]:
    import diffusers

    dit = diffusers.DiTTransformer2DModel(
        num_attention_heads=16, attention_head_dim=72, out_channels=8, num_layers=28, sample_size=32, patch_size=2
    )
    call = {"hidden_states": torch.randn(batch, 4, 32, 32), "timestep": torch.tensor([500] * batch)}
    return dit, {**call, "class_labels": torch.tensor([3] * batch), "return_dict": False}


def _sd3(batch: int) -> tuple[nn.Module, Call]:
    """Six of the 24 blocks of Stable Diffusion 3 medium, 1024 pixels."""
    import diffusers

    model = diffusers.SD3Transformer2DModel(
        sample_size=128, num_layers=6, attention_head_dim=64, num_attention_heads=24, caption_projection_dim=1536
    )
    call = {"hidden_states": torch.randn(batch, 16, 128, 128), "encoder_hidden_states": torch.randn(batch, 154, 4096)}
    more = {"pooled_projections": torch.randn(batch, 2048), "timestep": torch.tensor([500] * batch)}
    return model, {**call, **more, "return_dict": False}


def _flux(batch: int) -> tuple[nn.Module, Call]:
    """Two of the 19 double blocks and four of the 38 single blocks of Flux, 1024 pixels."""
    import diffusers

    model = diffusers.FluxTransformer2DModel(num_layers=2, num_single_layers=4, guidance_embeds=True)
    call = {"hidden_states": torch.randn(batch, 4096, 64), "encoder_hidden_states": torch.randn(batch, 512, 4096)}
    more = {"pooled_projections": torch.randn(batch, 768), "timestep": torch.full((batch,), 0.5)}
    ids = {"img_ids": torch.randint(64, (4096, 3)).float(), "txt_ids": torch.zeros(512, 3)}
    return model, {**call, **more, **ids, "guidance": torch.full((batch,), 3.5), "return_dict": False}


def _bert_large(batch: int) -> tuple[nn.Module, Call]:
    import transformers

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model = transformers.BertModel(transformers.BertConfig(**sizes))
    return model, _padded_ids(batch, 512, model.config.vocab_size)


def _bert_padded(batch: int) -> tuple[nn.Module, Call]:
    import transformers

    model = transformers.BertModel(transformers.BertConfig())
    return model, _padded_ids(batch, 128, model.config.vocab_size)


def _padded_ids(batch: int, tokens: int, words: int) -> Call:
    """Token ids of texts between half of ``tokens`` and all of them, with their mask."""
    lengths = torch.linspace(tokens // 2, tokens, batch).long()
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    return {"input_ids": torch.randint(words, (batch, tokens)) * mask, "attention_mask": mask}


def _llama_long(batch: int) -> tuple[nn.Module, Call]:
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False, **LLAMA))
    return model, {"input_ids": torch.randint(32000, (batch, 512))}


def _whisper(batch: int) -> tuple[nn.Module, Call]:
    """The encoder of Whisper small, 30 seconds."""
    import transformers

    sizes = {"d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072}
    model = transformers.WhisperModel(transformers.WhisperConfig(**sizes, decoder_layers=1)).encoder
    return model, {"input_features": torch.randn(batch, 80, 3000)}


def _vision(name: str, size: int, batch: int) -> tuple[nn.Module, Call]:
    import torchvision

    model = torchvision.models.get_model(name, weights=None)
    return model, {"x": torch.randn(batch, 3, size, size)}


def _deeplab(batch: int) -> tuple[nn.Module, Call]:
    import torchvision

    model = torchvision.models.get_model("deeplabv3_resnet50", weights=None, weights_backbone=None)
    return Scores(model), {"x": torch.randn(batch, 3, 512, 512)}


def _eva(batch: int) -> tuple[nn.Module, Call]:
    import timm

    model = timm.create_model("eva02_small_patch14_224", pretrained=False)
    return model, {"x": torch.randn(batch, 3, 224, 224)}


ROWS: dict[str, Row] = {
    **{f"{name} b{batch}": _case(name, batch) for batch in (1, 32) for name in TEN},
    "unet of SD 1.5 b2": _row(2, _unet),
    "VAE decoder of SD, 512 px b1": _row(1, _vae),
    "DiT-XL/2 b2": _row(2, _dit),
    "unet of SDXL b2": _row(2, _sdxl),
    "SD3 b2": _row(2, _sd3),
    "Flux b1": _row(1, _flux),
    "bert-large s512, padded b8": _row(8, _bert_large),
    "bert-base, padded b32": _row(32, _bert_padded),
    "llama-1.1b s512 b8": _row(8, _llama_long),
    "whisper-small encoder b4": _row(4, _whisper),
    "vit_l_16 b32": _row(32, partial(_vision, "vit_l_16", 224)),
    "swin_v2_t b32": _row(32, partial(_vision, "swin_v2_t", 256)),
    "maxvit_t b8": _row(8, partial(_vision, "maxvit_t", 224)),
    "eva02_small b32": _row(32, _eva),
    "deeplabv3_resnet50, 512 px b4": _row(4, _deeplab),
    "resnet50 b128": _case("resnet50", 128),
    **{
        f"{name}, float32 b{batch}": _case(name, batch)._replace(dtype=torch.float32)
        for batch in (1, 32)
        for name in ("resnet50", "bert-base")
    },
}
