"""Creates inputs for Hugging Face models from their configuration and signature."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .common import DEFAULT_SEQ_LEN, Request, ZooError, generator

AUDIO_SAMPLES = 16000


def example_inputs(model: PreTrainedModel, request: Request) -> dict[str, Tensor]:
    """Returns keyword arguments for one forward of ``model``, by its main input.

    Text: ``input_ids`` int64 (batch, seq) without the padding id, ``attention_mask`` of ones;
    encoder-decoders get ``decoder_input_ids`` too. Vision: ``pixel_values`` float32 (batch, channels, height,
    width). Audio: ``input_values`` (batch, samples) or ``input_features`` (batch, mel bins, frames).

    Raises:
        ZooError: the sequence is longer than the model's positions, or the main input is of another kind.
    """
    main = model.main_input_name
    if main == "pixel_values":
        return {"pixel_values": _pixels(model.config, request)}
    if main == "input_values":
        return {"input_values": torch.randn(request.batch_size, AUDIO_SAMPLES, generator=generator(), device="cpu")}
    if main == "input_features" and hasattr(model.config, "num_mel_bins"):
        features = (request.batch_size, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        limit = model.config.max_target_positions
        return {
            "input_features": torch.randn(features, generator=generator(), device="cpu"),
            "decoder_input_ids": _ids(model.config, request.batch_size, _length(model, limit, request)),
        }
    if main == "input_ids":
        return _text_inputs(model, request)
    raise ZooError(f"{type(model).__name__} takes {main!r}: kfconvert cannot create an example of it")


def max_positions(model: nn.Module) -> int | None:
    """Returns the longest sequence that the position embeddings of a text model allow; None if there is no limit."""
    limit = getattr(_text_config(model.config), "max_position_embeddings", None)
    if limit is None:
        return None
    for name, module in model.named_modules():
        # The RoBERTa family counts positions from padding_idx + 1, so the first rows are unused.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return limit - module.padding_idx - 1
    return limit


def _text_inputs(model: PreTrainedModel, request: Request) -> dict[str, Tensor]:
    parameters = inspect.signature(model.forward).parameters
    config = _text_config(model.config)
    length = _length(model, max_positions(model), request)
    inputs = {"input_ids": _ids(config, request.batch_size, length)}
    if "attention_mask" in parameters:
        inputs["attention_mask"] = torch.ones(request.batch_size, length, dtype=torch.long)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = _ids(config, request.batch_size, length)
    if "pixel_values" in parameters and hasattr(model.config, "vision_config"):
        inputs["pixel_values"] = _pixels(model.config.vision_config, request)
    return inputs


def _text_config(config: Any) -> Any:
    return getattr(config, "text_config", None) or config


def _length(model: nn.Module, limit: int | None, request: Request) -> int:
    if request.seq_len is None:
        return min(DEFAULT_SEQ_LEN, limit or DEFAULT_SEQ_LEN)
    if limit is not None and request.seq_len > limit:
        raise ZooError(
            f"sequence length {request.seq_len} is longer than the {limit} positions of {type(model).__name__}"
        )
    return request.seq_len


def _ids(config: Any, batch: int, length: int) -> Tensor:
    """Returns uniform ids of the vocabulary without the padding id; int64 (batch, length)."""
    pad = config.pad_token_id
    if pad is None or not 0 <= pad < config.vocab_size:
        return torch.randint(config.vocab_size, (batch, length), generator=generator(), device="cpu")
    ids = torch.randint(config.vocab_size - 1, (batch, length), generator=generator(), device="cpu")
    return ids + (ids >= pad)


def _pixels(config: Any, request: Request) -> Tensor:
    size = getattr(config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else tuple(size)
    return request.images(getattr(config, "num_channels", 3), height, width)
