"""The models of ``bench_variety``: small, with random weights, of kinds that differ in what their forwards do."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def ids(rows: int, length: int, most: int = 90) -> torch.Tensor:
    return torch.randint(3, most, (rows, length))


SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def of_tokens(name: str, length: int = 32, **options: Any) -> Callable[[], Any]:
    """A causal or masked language model of transformers."""

    def make() -> Any:
        import transformers

        kind = getattr(transformers, name)
        config = kind.config_class(**{**SMALL, "vocab_size": 100, **options})
        config.pad_token_id, config.use_cache = 0, False
        return kind(config), {"input_ids": ids(2, length)}

    return make


def of_images(name: str, size: int = 64, batch: int = 2, **options: Any) -> Callable[[], Any]:
    """An image model of timm."""

    def make() -> Any:
        import timm

        return timm.create_model(name, num_classes=10, **options), {"x": torch.randn(batch, 3, size, size)}

    return make


def of_torchvision(name: str, inputs: Callable[[], dict[str, Any]], **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torchvision

        return torchvision.models.get_model(name, weights=None, **options), inputs()

    return make


def detected(size: int = 128) -> dict[str, Any]:
    return {"images": [torch.rand(3, size, size), torch.rand(3, size, size)]}


def of_speech(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        kind = getattr(transformers, name)
        layers = {"conv_dim": (32, 32), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2}
        config = kind.config_class(
            **{**SMALL, **layers, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, **options}
        )
        return kind(config), {"input_values": torch.randn(1, 4000)}

    return make


def whisper() -> Any:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=100,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_source_positions=50,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        use_cache=False,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    return model, {"input_features": torch.randn(1, 80, 100), "decoder_input_ids": ids(1, 8)}


def t5() -> Any:
    import transformers

    config = transformers.T5Config(
        vocab_size=100, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, use_cache=False
    )
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": ids(2, 16), "decoder_input_ids": ids(2, 8)}


def unet() -> Any:
    import diffusers

    model = diffusers.UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    return model, {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor(10)}


def pixart() -> Any:
    import diffusers

    model = diffusers.PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=16,
        cross_attention_dim=64,
        caption_channels=32,
        use_additional_conditions=False,
    )
    inputs = {
        "hidden_states": torch.randn(2, 4, 16, 16),
        "encoder_hidden_states": torch.randn(2, 9, 32),
        "timestep": torch.tensor([3, 7]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return model, inputs


def tiny_coder() -> Any:
    import diffusers

    model = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(16, 16),
        decoder_block_out_channels=(16, 16),
        num_encoder_blocks=(1, 2),
        num_decoder_blocks=(2, 1),
    )
    return model, {"sample": torch.rand(2, 3, 32, 32)}, {"decode": {"x": torch.randn(2, 4, 16, 16)}}


def vector_quantized() -> Any:
    import diffusers

    model = diffusers.VQModel(
        block_out_channels=(16, 32),
        norm_num_groups=8,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        num_vq_embeddings=32,
    )
    return model, {"sample": torch.rand(2, 3, 32, 32)}, {"decode": {"h": torch.randn(2, 4, 16, 16)}}


def cogvideo() -> Any:
    import diffusers

    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=16,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=9,
        max_text_seq_length=8,
    )
    inputs = {
        "hidden_states": torch.randn(1, 3, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 8, 16),
        "timestep": torch.tensor([5]),
    }
    return model, inputs


class Convolved(nn.Module):
    """A graph network over an edge list: messages are gathered and added up."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        source, target = edges
        for layer, norm in zip(self.layers, self.norms):
            received = torch.zeros_like(x).index_add(0, target, x[source])
            x = torch.relu(norm(layer(torch.cat([x, received], 1)))) + x
        return x


class Attending(nn.Module):
    """A graph network with attention, over a dense mask of neighbours."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.project, self.score = nn.Linear(width, width), nn.Linear(width, 2)
        self.out = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, 8))

    def forward(self, x: torch.Tensor, neighbours: torch.Tensor) -> torch.Tensor:
        hidden = self.project(x)
        own, other = self.score(hidden).unbind(-1)
        scores = nn.functional.leaky_relu(own[:, :, None] + other[:, None], 0.2)
        return self.out(scores.masked_fill(~neighbours, -1e9).softmax(-1) @ hidden)


def graph_convolution() -> Any:
    return Convolved(), {"x": torch.randn(200, 64), "edges": torch.randint(200, (2, 800))}


def graph_attention() -> Any:
    return Attending(), {"x": torch.randn(2, 50, 64), "neighbours": torch.rand(2, 50, 50) > 0.7}


def tagger() -> Any:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.lstm = nn.Embedding(100, 32), nn.LSTM(32, 32, bidirectional=True, batch_first=True)
            self.head = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.lstm(self.words(input_ids))[0])

    return Tagger(), {"input_ids": ids(4, 20)}


def time_series() -> Any:
    import transformers

    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=64, patch_length=8, patch_stride=8, d_model=32, num_hidden_layers=2
    )
    return transformers.PatchTSTForPrediction(config), {"past_values": torch.randn(2, 64, 3)}


def segmented() -> Any:
    import transformers

    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 32, 32], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=32
    )
    return transformers.SegformerForSemanticSegmentation(config), {"pixel_values": torch.randn(1, 3, 64, 64)}


def dinov2() -> Any:
    import transformers

    config = transformers.Dinov2Config(**SMALL, image_size=56, patch_size=14)
    return transformers.Dinov2Model(config), {"pixel_values": torch.randn(2, 3, 56, 56)}


def video_mae() -> Any:
    import transformers

    config = transformers.VideoMAEConfig(**SMALL, image_size=32, patch_size=8, num_frames=4)
    return transformers.VideoMAEModel(config), {"pixel_values": torch.randn(1, 4, 3, 32, 32)}


MIXTURE = {"num_key_value_heads": 2, "num_experts_per_tok": 2}

MODELS: dict[str, Callable[[], Any]] = {
    "unet2d": unet,
    "pixart": pixart,
    "autoencoder_tiny": tiny_coder,
    "vq_model": vector_quantized,
    "cogvideox": cogvideo,
    "mixer_s32": of_images("mixer_s32_224", 224, 1),
    "mobilevit_xxs": of_images("mobilevit_xxs"),
    "ghostnet_050": of_images("ghostnet_050"),
    "hrnet_w18_small": of_images("hrnet_w18_small", batch=1),
    "levit_128s": of_images("levit_128s", 224, 1),
    "repvgg_a0": of_images("repvgg_a0"),
    "edgenext_xx_small": of_images("edgenext_xx_small"),
    "ssdlite320": of_torchvision("ssdlite320_mobilenet_v3_large", detected, weights_backbone=None, num_classes=5),
    "faster_rcnn": of_torchvision(
        "fasterrcnn_mobilenet_v3_large_320_fpn",
        detected,
        weights_backbone=None,
        num_classes=5,
        min_size=128,
        max_size=128,
    ),
    "lraspp": of_torchvision(
        "lraspp_mobilenet_v3_large", lambda: {"input": torch.randn(1, 3, 96, 96)}, weights_backbone=None
    ),
    "r3d_18": of_torchvision("r3d_18", lambda: {"x": torch.randn(1, 3, 4, 32, 32)}),
    "video_mae": video_mae,
    "segformer": segmented,
    "dinov2": dinov2,
    "wav2vec2": of_speech("Wav2Vec2ForCTC", vocab_size=32),
    "hubert": of_speech("HubertModel"),
    "whisper": whisper,
    "t5": t5,
    "deberta_v2": of_tokens("DebertaV2ForMaskedLM", relative_attention=True, position_buckets=16),
    "xlnet": of_tokens("XLNetLMHeadModel", d_model=64, n_layer=2, n_head=4, d_inner=128),
    "longformer": of_tokens("LongformerForMaskedLM", attention_window=8),
    "mixtral": of_tokens("MixtralForCausalLM", **MIXTURE, num_local_experts=4),
    "qwen2_moe": of_tokens(
        "Qwen2MoeForCausalLM",
        **MIXTURE,
        num_experts=4,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "olmoe": of_tokens("OlmoeForCausalLM", **MIXTURE, num_experts=4),
    "mamba": of_tokens("MambaForCausalLM", 16, state_size=8),
    "rwkv": of_tokens("RwkvForCausalLM", 16, attention_hidden_size=64),
    "patch_tst": time_series,
    "graph_convolution": graph_convolution,
    "graph_attention": graph_attention,
    "lstm_tagger": tagger,
}
