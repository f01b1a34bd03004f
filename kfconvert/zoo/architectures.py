"""Architectures of well-known Hugging Face checkpoints, for use without access to the hub.

Each entry is a configuration class of transformers and the values of the published ``config.json`` that differ from
the defaults of the class. tests/zoo/test_zoo.py compares each with the published number of parameters.
"""

from __future__ import annotations

from typing import Any

_BERT_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
_ELECTRA_BASE = {"embedding_size": 768, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
_BART_BASE = {
    "d_model": 768,
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 12,
    "decoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "decoder_ffn_dim": 3072,
}
_ALBERT_BASE = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert-base-uncased": ("BertConfig", {}),
    "bert-base-cased": ("BertConfig", {"vocab_size": 28996}),
    "bert-large-uncased": ("BertConfig", _BERT_LARGE),
    "bert-large-cased": ("BertConfig", {**_BERT_LARGE, "vocab_size": 28996}),
    "bert-base-multilingual-cased": ("BertConfig", {"vocab_size": 119547}),
    "roberta-base": ("RobertaConfig", _ROBERTA),
    "roberta-large": ("RobertaConfig", {**_ROBERTA, **_BERT_LARGE}),
    "xlm-roberta-base": ("XLMRobertaConfig", {**_ROBERTA, "vocab_size": 250002}),
    "distilbert-base-uncased": ("DistilBertConfig", {}),
    "distilroberta-base": ("RobertaConfig", {**_ROBERTA, "num_hidden_layers": 6}),
    "albert-base-v2": ("AlbertConfig", _ALBERT_BASE),
    "google/electra-small-discriminator": ("ElectraConfig", {}),
    "google/electra-base-discriminator": ("ElectraConfig", _ELECTRA_BASE),
    "sentence-transformers/all-MiniLM-L6-v2": ("BertConfig", _MINILM),
    "sentence-transformers/all-mpnet-base-v2": (
        "MPNetConfig",
        {"vocab_size": 30527, "max_position_embeddings": 514, "layer_norm_eps": 1e-5},
    ),
    "gpt2": ("GPT2Config", {}),
    "distilgpt2": ("GPT2Config", {"n_layer": 6}),
    "gpt2-medium": ("GPT2Config", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("GPT2Config", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("GPT2Config", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "facebook/opt-125m": ("OPTConfig", {}),
    "facebook/bart-base": ("BartConfig", _BART_BASE),
    "t5-small": ("T5Config", {}),
    "google/vit-base-patch16-224": ("ViTConfig", {}),
    "facebook/deit-base-distilled-patch16-224": ("DeiTConfig", {}),
    "facebook/dinov2-base": ("Dinov2Config", {"image_size": 518, "patch_size": 14}),
    "microsoft/swin-tiny-patch4-window7-224": ("SwinConfig", {}),
    "facebook/convnext-tiny-224": ("ConvNextConfig", {}),
    "microsoft/resnet-50": ("ResNetConfig", {}),
    "openai/clip-vit-base-patch32": ("CLIPConfig", {}),
}

# The hub puts these organizations before the old short names of checkpoints.
_ORGANISATIONS = frozenset(("google-bert", "FacebookAI", "distilbert", "albert", "openai-community", "google-t5"))


def built_in(name: str) -> str | None:
    """Returns the key in ``ARCHITECTURES`` of a checkpoint with its old or present name; None if there is none."""
    organisation, _, short = name.rpartition("/")
    found = short if organisation in _ORGANISATIONS else name
    return found if found in ARCHITECTURES else None
