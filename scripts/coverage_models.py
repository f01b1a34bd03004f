"""The models of scripts/coverage.py: small, with random weights, and with inputs that they accept. No downloads."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfconvert.zoo.common import Request, enliven, seeded

BATCH = 2
TOKENS = 12
IMAGE = 64


class Entry(NamedTuple):
    """A model of one source. ``make()`` gives the model in eval mode and ``example_inputs`` for a batch of BATCH."""

    source: str
    name: str
    make: Callable[[], tuple[nn.Module, Any]]


def entries() -> list[Entry]:
    """All models, source by source."""
    return [*_torchvision(), *_huggingface(), *_timm()]


def request() -> Request:
    return Request("random", BATCH, TOKENS)


def _alive(build: Callable[[], nn.Module]) -> nn.Module:
    """``build()`` with a fixed seed, and with biases, scales and statistics that are not 0 and 1."""
    with seeded():
        model = build().eval()
    enliven(model)
    return model


# torchvision

# Where 64 x 64 is too small, or not a multiple of the windows.
TORCHVISION_SIZES = {"alexnet": 96, "inception_v3": 96, "maxvit_t": 224}
SCORES = re.compile(r"cls_logits$|cls_score$|classification_head\.module_list\.\d+(\.1)?$")
DETECTION = (
    "fasterrcnn_mobilenet_v3_large_320_fpn",
    "fasterrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)


def _torchvision() -> list[Entry]:
    from torchvision import models

    classifiers = models.list_models(module=models)
    segmenters = models.list_models(module=models.segmentation)
    return [
        *(Entry("torchvision classification", name, _classifier(name)) for name in classifiers),
        *(Entry("torchvision segmentation", name, _segmenter(name)) for name in segmenters),
        *(Entry("torchvision detection", name, _detector(name)) for name in DETECTION),
    ]


def _classifier(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        from torchvision import models

        size = TORCHVISION_SIZES.get(name, IMAGE)
        options: dict[str, Any] = {}
        if name.startswith("vit_"):
            # A multiple of the patches, which vit_h_14 has of 14 pixels.
            size = 56 if name.endswith("14") else size
            options = {"image_size": size}
        elif name in ("googlenet", "inception_v3"):
            options = {"init_weights": True, "transform_input": True}
        model = _alive(lambda: models.get_model(name, weights=None, **options))
        return model, request().images(3, size, size)

    return make


def _segmenter(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        from torchvision import models

        model = _alive(lambda: models.get_model(name, weights=None, weights_backbone=None))
        return model, request().images(3, IMAGE, IMAGE)

    return make


def _detector(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        from torchvision import models

        # The two-stage and RetinaNet models resize their images: to these sizes, not to 800.
        sizes = {} if name.startswith("ssd") else {"min_size": 96, "max_size": 128}
        model = _alive(lambda: models.get_model(name, weights=None, weights_backbone=None, num_classes=5, **sizes))
        for path, layer in model.named_modules():
            # As initialised all scores are nearly equal, and rounding would decide which boxes remain.
            if isinstance(layer, (nn.Linear, nn.Conv2d)) and SCORES.search(path):
                layer.weight.data.mul_(10)
        first, second = request().images(3, 96, 128)
        return model, ([first, second],)

    return make


# Hugging Face: the class and what makes its configuration small.

_IDS = {"vocab_size": 120, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER = {
    **_IDS,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 2}
_SEQ2SEQ = {
    **_IDS,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "decoder_start_token_id": 1,
}
_T5 = {
    "vocab_size": 120,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_VISION = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 64,
    "patch_size": 16,
}
_PAIR = {"text_config": _ENCODER, "vision_config": _VISION}
_STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}

HUGGINGFACE: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _ENCODER),
    "roberta": ("RobertaModel", _ENCODER),
    "distilbert": (
        "DistilBertModel",
        {**_IDS, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "max_position_embeddings": 64},
    ),
    "albert": ("AlbertModel", {**_ENCODER, "embedding_size": 32}),
    "electra": ("ElectraModel", {**_ENCODER, "embedding_size": 32}),
    "deberta-v2": (
        "DebertaV2Model",
        {**_ENCODER, "relative_attention": True, "position_buckets": 16, "pos_att_type": ["p2c", "c2p"]},
    ),
    "gpt2": ("GPT2LMHeadModel", {**_IDS, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "gpt-neo": (
        "GPTNeoForCausalLM",
        {
            **_IDS,
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
            "window_size": 8,
        },
    ),
    "opt": ("OPTForCausalLM", {**_ENCODER, "ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": ("BloomForCausalLM", {**_IDS, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5-gated": (
        "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": ("BartForConditionalGeneration", {**_SEQ2SEQ, "max_position_embeddings": 64}),
    "llama": ("LlamaForCausalLM", _DECODER),
    "mistral": ("MistralForCausalLM", {**_DECODER, "sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", _DECODER),
    "qwen3": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {**_DECODER, "head_dim": 16, "sliding_window": 8}),
    "phi": ("PhiForCausalLM", _ENCODER),
    "falcon": ("FalconForCausalLM", {**_IDS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "vit": ("ViTModel", _VISION),
    "deit": ("DeiTModel", _VISION),
    "swin": (
        "SwinModel",
        {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "image_size": 64},
    ),
    "convnext": ("ConvNextModel", {**_STAGES, "image_size": 64}),
    "dinov2": ("Dinov2Model", {**_VISION, "mlp_ratio": 2}),
    "beit": ("BeitModel", {**_VISION, "use_absolute_position_embeddings": True}),
    "segformer": (
        "SegformerForSemanticSegmentation",
        {
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
            "decoder_hidden_size": 32,
            "image_size": 64,
        },
    ),
    "detr": (
        "DetrForObjectDetection",
        {
            "use_timm_backbone": False,
            "use_pretrained_backbone": False,
            "backbone": None,
            "backbone_config": {"model_type": "resnet", "embedding_size": 16, **_STAGES, "out_features": ["stage4"]},
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_queries": 10,
        },
    ),
    "clip": ("CLIPModel", {**_PAIR, "projection_dim": 32}),
    "siglip": ("SiglipModel", _PAIR),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 64},
    ),
    "wav2vec2": (
        "Wav2Vec2Model",
        {**_ENCODER, "conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2},
    ),
    "mamba": (
        "MambaForCausalLM",
        {**_IDS, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4},
    ),
    "mixtral": ("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def _huggingface() -> list[Entry]:
    return [Entry("Hugging Face", name, _transformer(*small)) for name, small in HUGGINGFACE.items()]


def _transformer(class_name: str, values: dict[str, Any]) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        import transformers

        from kfconvert.zoo.huggingface_inputs import example_inputs

        model_class = getattr(transformers, class_name)
        config = model_class.config_class(**values)
        if hasattr(config, "use_cache"):
            config.use_cache = False  # the example is one forward without a cache; generate() asks for one itself
        model = _alive(lambda: model_class(config))
        return model, example_inputs(model, request())

    return make


def generated(model: nn.Module, inputs: dict[str, Tensor], use_cache: bool, new_tokens: int = 8) -> Tensor:
    """The greedy continuation of the prompt in ``inputs``, int64 (batch, tokens)."""
    prompt = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
    with torch.no_grad():
        return model.generate(**prompt, max_new_tokens=new_tokens, do_sample=False, use_cache=use_cache)


# timm: one architecture of each family, a family being a module of timm.models.

_SMALLEST_FIRST = (
    *("test", "zepto", "atto", "femto", "pico", "nano", "xxtiny", "xxs", "xtiny", "xs", "tiny", "t", "mini"),
    *("s0", "small", "s", "m", "medium"),
)
# The second fits patches of 14 pixels.
TIMM_IMAGES = (128, 112)


def _timm() -> list[Entry]:
    import timm

    families = {module: timm.list_models(module=module) for module in timm.list_modules()}
    return [
        Entry("timm", f"{family}/{name}", _timm_model(name))
        for family, names in sorted(families.items())
        if names
        for name in [min(names, key=_size_by_name)]
    ]


def _size_by_name(name: str) -> tuple:
    """Sorts the smallest variant of a family first: by the word for its size, its images, its numbers."""
    import timm

    words = re.split(r"[_.]", name)
    rank = min((_SMALLEST_FIRST.index(word) for word in words if word in _SMALLEST_FIRST), default=99)
    published = timm.get_pretrained_cfg(name)
    pixels = published.input_size[-1] if published else 224
    return rank, pixels, [int(number) for number in re.findall(r"\d+", name)], len(name), name


def _timm_model(name: str) -> Callable[[], tuple[nn.Module, Any]]:
    def make() -> tuple[nn.Module, Any]:
        for size in TIMM_IMAGES:
            try:
                return _timm_sized(name, size)
            except Exception:  # of a model that takes no such images
                continue
        return _timm_sized(name, None)

    return make


def _timm_sized(name: str, size: int | None) -> tuple[nn.Module, Any]:
    import timm

    def build() -> nn.Module:
        if size is not None:
            try:
                return timm.create_model(name, pretrained=False, img_size=size)
            except TypeError:  # it does not need to know the size
                pass
        return timm.create_model(name, pretrained=False)

    model = _alive(build)
    channels, default, _ = model.default_cfg["input_size"]
    images = request().images(channels, size or default, size or default)
    with torch.no_grad():
        model(images)
    return model, images
