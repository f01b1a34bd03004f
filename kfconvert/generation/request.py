"""What a call of ``generate`` asks for, as far as the lean loop can do it; transformers has prepared it by then."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Processors of scores of transformers that compute the same from a row of tokens that is filled up with one of them,
# and from nothing else that changes from step to step.
_AS_THEY_ARE = frozenset(
    ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper", "TypicalLogitsWarper")
)
_PENALTY, _MIN_LENGTH, _MIN_NEW = (
    "RepetitionPenaltyLogitsProcessor",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
)
_CRITERIA = frozenset(("MaxLengthCriteria", "EosTokenCriteria"))
# The arguments that go to the model, beside the cache.
_OF_MODEL = frozenset(("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"))


class NotServed(Exception):
    """Why transformers' own loop is to be run."""


@dataclass(frozen=True)
class Request:
    """A call of ``generate`` that decides by one row of scores for each row of the batch.

    ``processors`` change the scores in this order. ``ends`` are the tokens after which a row is finished, and gets
    ``pad`` from then on; empty where it ends by its length alone. ``max_length`` counts the prompt. ``criteria`` are
    all stopping criteria where there is one that must be asked after each token, else None.
    """

    processors: tuple[Any, ...]
    do_sample: bool
    ends: tuple[int, ...]
    pad: int
    max_length: int
    least: int
    criteria: Any = None

    @property
    def key(self) -> Hashable:
        """What a recording of a step depends on."""
        return self.do_sample, self.ends, self.pad, tuple(map(_described, self.processors))

    def held_back(self, words: int, device: torch.device) -> Tensor | None:
        """Which of so many words the last processors forbid before ``least``, boolean of shape [words]: a greedy choice
        may leave them out by itself. None where there are none."""
        processors = self.processors[self._first_of_last :]
        every = torch.arange(words, device=device)
        ends = [torch.isin(every, processor.eos_token_id.to(device)) for processor in processors]
        return torch.stack(ends).any(0) if ends else None

    def endings(self, words: int, device: torch.device) -> dict[int, Tensor]:
        """As ``held_back``, of each such processor that ``scores`` applies, by its number."""
        every = torch.arange(words, device=device)
        return {
            index: torch.isin(every, processor.eos_token_id.to(device))
            for index, processor in enumerate(self.processors[: self._first_of_last])
            if _holds_back(processor)
        }

    @property
    def _first_of_last(self) -> int:
        """The number of the first of the processors that leave words out, with none of another kind after them."""
        count = len(self.processors)
        while count and not self.do_sample and _holds_back(self.processors[count - 1]):
            count -= 1
        return count

    def scores(
        self, sequences: Tensor, length: Tensor, least: Tensor, logits: Tensor, endings: dict[int, Tensor]
    ) -> Tensor:
        """The scores as the processors leave them, but for what is to be held back.

        Args:
            sequences: int64 of shape [batch, width]: the tokens of each row, which is filled up with its first.
            length: int64 of shape [1], how many tokens there are in a row so far.
            least: int64 of shape [1], a row does not end before it has so many.
            logits: of shape [batch, words], of any floating dtype; the scores are float32, as those of transformers, or
                where no processor changes them, which makes no difference, of a half type.
        """
        processors = self.processors[: self._first_of_last]
        if not processors and not self.do_sample:
            logits = logits.float() if logits.dtype is torch.float64 else logits
            return logits if logits.stride(-1) == 1 else logits.contiguous()
        scores = logits.to(torch.float32, copy=True)
        for index, processor in enumerate(processors):
            if index in endings:
                scores = torch.where(endings[index] & (length < least), -torch.inf, scores)
            else:
                scores = processor(sequences, scores)
        return scores

    def drawn(self, scores: Tensor, noise: Tensor) -> Tensor:
        """What is largest at the token that is drawn of each row, of the shape of ``scores``.

        ``noise`` are exponentially distributed numbers, float32 of the shape of ``scores``. Shares divided by such
        numbers are largest where ``torch.multinomial`` draws, which divides by them, too, but waits for the device.
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
    """What is asked for, by the arguments that ``generate`` hands to the loop for ``input_ids`` [batch, length].

    Raises:
        NotServed: something else than tokens is asked for, or they are to be chosen in a way that is not known here.
    """
    if str(config.get_generation_mode()).rpartition(".")[2] not in ("GREEDY_SEARCH", "SAMPLE"):
        raise NotServed("it is neither greedy search nor sampling")
    for is_so, reason in (
        (synced, "its ranks wait for one another"),
        (config.return_dict_in_generate, "it returns more than tokens"),
        (not config.use_cache, "it uses no cache"),
        (config.prefill_chunk_size is not None, "it takes the prompt in pieces"),
    ):
        if is_so:
            raise NotServed(reason)
    if not _OF_MODEL.issuperset(of_model) or not input_ids.shape[1]:
        raise NotServed(f"the model gets {', '.join(sorted(of_model.keys() - _OF_MODEL)) or 'no tokens'}")
    cache: Any = of_model.get("past_key_values")
    if type(cache).__name__ != "DynamicCache" or cache.get_seq_length():
        raise NotServed("its cache is not a new DynamicCache")
    if getattr(cache, "_is_user_defined", False):
        raise NotServed("it is to fill a cache of the caller's")
    named = {type(each).__name__: each for each in criteria if _is_known_criterion(each)}
    unknown = [type(each).__name__ for each in processors if not _is_known(each)]
    if unknown:
        raise NotServed(f"its scores go through {unknown[0]}")
    ends = named["EosTokenCriteria"].eos_token_id.tolist() if "EosTokenCriteria" in named else []
    pad = config._pad_token_tensor
    if ends and pad is None:
        raise NotServed("it has no token for finished rows")
    if not ends and any(hasattr(each, "eos_token_id") for each in criteria):
        raise NotServed("a stopping criterion has ends of its own, after which rows are filled up")
    if _hold_back_differently(processors):
        raise NotServed("some ends are held back for longer than others")
    return Request(
        tuple(processors),
        bool(config.do_sample),
        tuple(ends),
        int(pad) if ends else 0,
        named["MaxLengthCriteria"].max_length if "MaxLengthCriteria" in named else config.max_length,
        max((_least(each) for each in processors), default=0),
        criteria if len(named) < len(criteria) else None,
    )


def _is_known_criterion(criterion: Any) -> bool:
    return type(criterion).__name__ in _CRITERIA and type(criterion).__module__.startswith("transformers.")


def _hold_back_differently(processors: Sequence[Any]) -> bool:
    """Whether some processors hold other tokens back than others do, and for another length; a step knows but one."""
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
    return name in _AS_THEY_ARE or _holds_back(processor)


def _holds_back(processor: Any) -> bool:
    """Whether it forbids some words until a row is long enough, and does nothing else."""
    return type(processor).__name__ in (_MIN_LENGTH, _MIN_NEW)


def _least(processor: Any) -> int:
    """Before how many tokens of a row, those of the prompt included, the processor forbids its end."""
    name = type(processor).__name__
    if name == _MIN_LENGTH:
        return processor.min_length
    return processor.prompt_length_to_skip + processor.min_new_tokens if name == _MIN_NEW else 0


def _described(processor: Any) -> Hashable:
    name = type(processor).__name__
    attributes = dict(vars(processor))
    for each in ("min_length", "min_new_tokens", "prompt_length_to_skip") if _holds_back(processor) else ():
        attributes.pop(each, None)  # ``least`` has them
    values = {key: tuple(v.flatten().tolist()) if isinstance(v, Tensor) else v for key, v in attributes.items()}
    return name, tuple(sorted((key, repr(value)) for key, value in values.items()))
