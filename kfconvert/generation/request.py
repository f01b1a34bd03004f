"""Requests of the lean loop: a ``generate`` call that transformers has prepared and the loop supports."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..inputs import is_resident, layers_of, tensors_of

# Logits processors of transformers whose results do not change if a row of tokens is padded with one of its tokens, and
# that depend on nothing else that changes between steps.
_AS_THEY_ARE = frozenset(
    ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper")
)
_PENALTY, _MIN_LENGTH, _MIN_NEW = (
    "RepetitionPenaltyLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
)
_SUPPRESS, _SUPPRESS_FIRST = "SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor"
_CRITERIA = frozenset(("MaxLengthCriteria", "EosTokenCriteria"))
# The names of the cache, and all arguments of the model.
CACHES = ("past_key_values", "cache_params")
_OF_MODEL = frozenset(("attention_mask", "position_ids", "use_cache", "logits_to_keep", "encoder_outputs", *CACHES)) | {
    "decoder_attention_mask",
    "decoder_position_ids",
}


class NotServed(Exception):
    """Raised if transformers' loop must run instead. The message has the reason."""


@dataclass(frozen=True)
class Request:
    """A call of ``generate`` that selects tokens by one row of scores per row of the batch.

    ``processors`` change the scores in this order. ``ends`` are the tokens that finish a row, which then gets ``pad``;
    empty if only the length ends rows. ``max_length`` includes the prompt. ``criteria`` are all stopping criteria if
    one of them must run after each token, else None. ``cache`` is the name of the cache among the arguments of the
    model; ``returns_cache``: whether the caller receives it.
    """

    processors: tuple[Any, ...]
    do_sample: bool
    ends: tuple[int, ...]
    pad: int
    max_length: int
    least: int
    criteria: Any = None
    cache: str = CACHES[0]
    returns_cache: bool = False

    @cached_property
    def key(self) -> Hashable:
        """Equal for requests with the same selection of tokens. Reads tensors of processors, which waits for the
        device, so it is computed once."""
        return self.do_sample, self.ends, self.pad, tuple(map(_described, self.processors))

    def forbidden(self, words: int, device: torch.device) -> dict[int, Tensor]:
        """Returns a boolean mask [words] of the words that a processor forbids, always or up to a length, by index of
        the processor."""
        every = torch.arange(words, device=device)
        tokens = ((index, _forbids(processor)) for index, processor in enumerate(self.processors))
        return {index: torch.isin(every, each.to(device)) for index, each in tokens if each is not None}

    def scores(
        self, sequences: Tensor, length: Tensor, least: Tensor, logits: Tensor, forbidden: dict[int, Tensor]
    ) -> Tensor:
        """Applies the processors to the scores.

        Args:
            sequences: int64 of shape [batch, width]: the tokens of each row, padded with its first token.
            length: int64 of shape [1], number of tokens in a row.
            least: int64 of shape [1], minimum length of a row.
            forbidden: the result of ``forbidden``.
            logits: shape [batch, words], any floating-point dtype. The scores are float32, as in transformers, or of a
                half type if no processor changes them, which is equivalent.
        """
        if not self.processors and not self.do_sample:
            logits = logits.float() if logits.dtype is torch.float64 else logits
            return logits if logits.stride(-1) == 1 else logits.contiguous()
        scores = logits.to(torch.float32, copy=True)
        for index, processor in enumerate(self.processors):
            if index in forbidden:
                mask = forbidden[index]
                if _holds_back(processor):
                    mask = mask & (length < least)
                elif type(processor).__name__ == _SUPPRESS_FIRST:
                    mask = mask & (length == processor.begin_index)
                scores = torch.where(mask, -torch.inf, scores)
            else:
                scores = processor(sequences, scores)
        return scores

    def drawn(self, scores: Tensor, noise: Tensor) -> Tensor:
        """Returns values, in the shape of ``scores``, whose maximum in each row is the drawn token.

        ``noise`` has exponentially distributed numbers, float32 in the shape of ``scores``. Probabilities divided by
        them have their maximum where ``torch.multinomial`` draws, which does the same, but synchronizes.
        """
        return torch.nn.functional.softmax(scores, dim=-1).div(noise)


def request(
    input_ids: Tensor,
    processors: Sequence[Any],
    criteria: Sequence[Any],
    config: Any,
    synced: bool,
    of_model: dict[str, Any],
) -> Request:
    """Returns the request for the arguments that ``generate`` passes to the loop for ``input_ids`` [batch, length].

    Raises:
        NotServed: the call returns more than tokens, or selects them in an unknown way.
    """
    if str(config.get_generation_mode()).rpartition(".")[2] not in ("GREEDY_SEARCH", "SAMPLE"):
        raise NotServed("it is neither greedy search nor sampling")
    for is_so, reason in (
        (synced, "it synchronizes ranks (synced_gpus)"),
        (_returns_more(config), "it returns more than tokens and a cache"),
        (not config.use_cache, "it uses no cache"),
    ):
        if is_so:
            raise NotServed(reason)
    given = {argument for argument, value in of_model.items() if value is not None}
    if not _OF_MODEL.issuperset(given) or not input_ids.shape[1]:
        raise NotServed(f"the model receives {', '.join(sorted(given - _OF_MODEL)) or 'no tokens'}")
    name = next((each for each in CACHES if of_model.get(each) is not None), CACHES[0])
    cache, mask = of_model.get(name), of_model.get("attention_mask")
    if not is_resident(cache):
        raise NotServed("its cache is not a DynamicCache on the device with the usual layers")
    is_filled = any(any(tensors_of(each)) for each in layers_of(cache))
    returns_cache = bool(config.return_dict_in_generate or getattr(cache, "_is_user_defined", False))
    if "encoder_outputs" in given and (is_filled or returns_cache):
        raise NotServed("it receives or returns the cache of an encoder-decoder")
    masked = getattr(config, "_mask_length", -1) if mask is None else mask.shape[1]
    if is_filled and masked != input_ids.shape[1]:
        raise NotServed("its prompt lacks the tokens in the cache")
    named = {type(each).__name__: each for each in criteria if _is_known_criterion(each)}
    unknown = [type(each).__name__ for each in processors if not _is_known(each)]
    if unknown:
        raise NotServed(f"its scores are processed by {unknown[0]}")
    ends = named["EosTokenCriteria"].eos_token_id.tolist() if "EosTokenCriteria" in named else []
    pad = config._pad_token_tensor
    if ends and pad is None:
        raise NotServed("it has no padding token for finished rows")
    if not ends and any(hasattr(each, "eos_token_id") for each in criteria):
        raise NotServed("a stopping criterion has separate end tokens, after which rows are padded")
    if _hold_back_differently(processors):
        raise NotServed("its end tokens have different minimum lengths")
    return Request(
        tuple(processors),
        bool(config.do_sample),
        tuple(ends),
        int(pad) if ends else 0,
        named["MaxLengthCriteria"].max_length if "MaxLengthCriteria" in named else config.max_length,
        max((_least(each) for each in processors), default=0),
        criteria if len(named) < len(criteria) else None,
        name,
        returns_cache,
    )


def _returns_more(config: Any) -> bool:
    """Whether ``generate`` returns values of each step besides the tokens and the cache."""
    names = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    return config.return_dict_in_generate and any(getattr(config, name, None) for name in names)


def _is_known_criterion(criterion: Any) -> bool:
    return type(criterion).__name__ in _CRITERIA and type(criterion).__module__.startswith("transformers.")


def _hold_back_differently(processors: Sequence[Any]) -> bool:
    """Whether processors forbid different tokens up to different lengths. A step supports only one length."""
    found = [each for each in processors if _holds_back(each)]
    tokens = {tuple(sorted(each.eos_token_id.flatten().tolist())) for each in found}
    return len(tokens) > 1 and len(set(map(_least, found))) > 1


def _is_known(processor: Any) -> bool:
    name = type(processor).__name__
    if not type(processor).__module__.startswith("transformers."):
        return False
    if name == _PENALTY:
        others = ("prompt_ignore_length", "logits_indices", "cu_seq_lens_q")
        return all(getattr(processor, each, None) is None for each in others)
    return name in _AS_THEY_ARE or _forbids(processor) is not None


def _holds_back(processor: Any) -> bool:
    """Whether ``processor`` only forbids some words until a row has a minimum length."""
    return type(processor).__name__ in (_MIN_LENGTH, _MIN_NEW)


def _forbids(processor: Any) -> Tensor | None:
    """The tokens that ``processor`` forbids, if it does nothing else."""
    name = type(processor).__name__
    held = {_SUPPRESS: "suppress_tokens", _SUPPRESS_FIRST: "begin_suppress_tokens"}
    return getattr(processor, "eos_token_id" if _holds_back(processor) else held.get(name, ""), None)


def _least(processor: Any) -> int:
    """The minimum length of a row, including the prompt, before which the processor forbids its end."""
    name = type(processor).__name__
    if name == _MIN_LENGTH:
        return processor.min_length
    return processor.prompt_length_to_skip + processor.min_new_tokens if name == _MIN_NEW else 0


def _described(processor: Any) -> Hashable:
    name = type(processor).__name__
    attributes = dict(vars(processor))
    for each in ("min_length", "min_new_tokens", "prompt_length_to_skip") if _holds_back(processor) else ():
        attributes.pop(each, None)  # these are in ``least``
    values = {key: tuple(v.flatten().tolist()) if isinstance(v, Tensor) else v for key, v in attributes.items()}
    return name, tuple(sorted((key, repr(value)) for key, value in values.items()))
