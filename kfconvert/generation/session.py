"""The tensors of a step of generation, which a recording reads and writes in place, and the recordings over them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import next_token_
from ..runtime import Pool, Repeated, Unrecordable, Variant, library_switches
from .request import Request

# So many ways to choose tokens are recorded over the same tensors.
MOST_RECORDINGS = 4


class _Fixed(NamedTuple):
    """What is the same in each step of a request, and so is none of a recording's work."""

    endings: dict[int, Tensor]
    held_back: Tensor | None
    ends: Tensor | None


class Session:
    """Generates for one batch size with a cache of one capacity, one request after the other.

    All tensors lie where they are for as long as it lives. Of each row of ``sequences`` [batch, capacity + 1], int64,
    the first ``length`` (int64, shape [1]) are tokens; the rest is filled up with its first. Random numbers are drawn
    before each step and not within it, so that a recording draws none.

    Args:
        pool: where the recordings of steps lie, one after the other; None where none are made.
    """

    def __init__(self, variant: Variant, batch: int, capacity: int, pool: Pool | None):
        self.variant, self.batch, self.capacity, self.pool = variant, batch, capacity, pool
        # Tensors made under inference_mode could not be written to without it.
        with torch.inference_mode(False):
            self.leaves = _leaves(variant, batch, capacity)
            self.arguments = variant.region.call.keywords(self.leaves)
            self.cache = self.arguments["past_key_values"]
            self.device: torch.device = self.arguments["input_ids"].device
            new = partial(torch.zeros, device=self.device)
            self.sequences = new(batch, capacity + 1, dtype=torch.long)
            self.length, self.least = new(1, dtype=torch.long), new(1, dtype=torch.long)
            self.finished = new(batch, dtype=torch.bool)
            # Whether a token was to be drawn by scores of which some are no numbers.
            self.is_undrawable = new(1, dtype=torch.bool)
            self._scratch = new(batch + 1, dtype=torch.long)
        self._noise: Tensor | None = None
        # How many words there are to choose from, from the first request on.
        self._words = 0
        self._plans: Any = None
        self._steps: dict[Hashable, _Step] = {}
        self._known: dict[Hashable, _Fixed] = {}

    def begin(self, asked: Request, input_ids: Tensor, of_model: dict[str, Any], filled: Any, logits: Tensor) -> None:
        """Take over a prompt that the model has seen.

        Args:
            input_ids: its tokens, [batch, length].
            of_model: the arguments that the model got with it.
            filled: the ``DynamicCache`` that the model has filled.
            logits: those of its last token, [batch, words].
        """
        batch, length = input_ids.shape
        self.sequences.copy_(input_ids[:, :1].expand_as(self.sequences))
        self.sequences[:, :length] = input_ids
        self.length.fill_(length)
        self.least.fill_(asked.least)
        self.finished.fill_(False)
        self.is_undrawable.fill_(False)
        held = [tensor for layer in self.cache.layers for tensor in (layer.keys, layer.values)]
        found = [tensor for layer in filled.layers for tensor in (layer.keys, layer.values)]
        torch._foreach_zero_(held)
        # What a layer with a window has dropped is outside of that window.
        places = [slice(length - source.shape[2], length) for source in found]
        torch._foreach_copy_([target[:, :, place] for target, place in zip(held, places)], found)
        # The step that comes counts on by one.
        self.cache.position.fill_(length - 1)
        mask, positions = of_model.get("attention_mask"), of_model.get("position_ids")
        if "attention_mask" in self.arguments:
            self.arguments["attention_mask"].fill_(1)
            if mask is not None:
                self.arguments["attention_mask"][:, :length] = mask
        if "position_ids" in self.arguments:
            last = torch.full((batch, 1), length - 1, device=self.device) if positions is None else positions[:, -1:]
            self.arguments["position_ids"].copy_(last.expand(batch, 1))
        self._words = logits.shape[-1]
        if asked.do_sample:
            self._make_noise()
            self.draw()
        self._take(asked, self._fixed(asked), logits)

    def grown(self, larger: Session) -> None:
        """Let ``larger`` go on where this one is."""
        larger.sequences.copy_(self.sequences[:, :1].expand_as(larger.sequences))
        larger.sequences[:, : self.capacity + 1] = self.sequences
        for name in ("length", "least", "finished", "is_undrawable"):
            getattr(larger, name).copy_(getattr(self, name))
        for name, value in self.arguments.items():
            if name == "attention_mask":
                larger.arguments[name].fill_(1)
                larger.arguments[name][:, : self.capacity] = value
            elif isinstance(value, Tensor):
                larger.arguments[name].copy_(value)
        larger.cache.position.copy_(self.cache.position)
        for held, others in zip(self.cache.layers, larger.cache.layers):
            for source, target in ((held.keys, others.keys), (held.values, others.values)):
                target.zero_()
                target[:, :, : self.capacity] = source
        larger._words = self._words
        if self._noise is not None:
            larger._make_noise()

    def take_over(self, tokens: Tensor) -> None:
        """Let ``tokens`` [batch, length] be those of the rows so far, the last of which is the next input."""
        self.sequences[:, : tokens.shape[1]] = tokens
        self.arguments["input_ids"].copy_(tokens[:, -1:])

    def step(self, asked: Request) -> Callable[[], None]:
        """What makes one more token of each row; a recording from its second call on. It must be asked for again after
        anything of the model may have changed. Raises UnfitTensors."""
        plans = self.variant.program.plans(self.leaves)
        if plans is not self._plans or len(self._steps) >= MOST_RECORDINGS:
            self._steps.clear()
            self._plans = plans
        weights = self.variant.program.read_by_code()
        key = (asked.key, library_switches(), tuple(map(id, weights)))
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = _Step(asked, self._fixed(asked), plans, self.pool, weights)
        return partial(step.run, self)

    def _make_noise(self) -> None:
        if self._noise is None:
            with torch.inference_mode(False):
                self._noise = torch.empty(self.batch, self._words, dtype=torch.float32, device=self.device)

    def draw(self) -> None:
        """Draw the random numbers of the next step, where it takes any."""
        if self._noise is not None:
            self._noise.exponential_(1)

    def _fixed(self, asked: Request) -> _Fixed:
        words, device = self._words, self.device
        key = words, asked.key
        if key not in self._known:
            if len(self._known) >= MOST_RECORDINGS:
                self._known.clear()
            ends = torch.tensor(asked.ends, device=device) if asked.ends else None
            self._known[key] = _Fixed(asked.endings(words, device), asked.held_back(words, device), ends)
        return self._known[key]

    def run(self, asked: Request, fixed: _Fixed, plans: Any) -> None:
        """A step by ``plans``, launched."""
        flat = self.variant.program.computed(plans, self.leaves)
        cache = type(self.cache)(self.cache.tensors())
        outputs = self.variant.region.outputs.put_together(flat, [cache])
        for held, written in zip(self.cache.tensors(), cache.tensors()):
            if written.data_ptr() != held.data_ptr():
                held.copy_(written)
        self._take(asked, fixed, outputs.logits[:, -1])

    def _take(self, asked: Request, fixed: _Fixed, logits: Tensor) -> None:
        """Choose a token of each row by the ``logits`` [batch, words] of its last one, and let it be the next input."""
        scores = asked.scores(self.sequences, self.length, self.least, logits, fixed.endings)
        if asked.do_sample and self._noise is not None:
            scores = asked.drawn(scores, self._noise)
            # Shares are no numbers in all of a row, or in none of it.
            self.is_undrawable.logical_or_(scores[:, 0].isnan().any())
        next_token_(
            scores, fixed.held_back, self.least, fixed.ends, asked.pad, self.sequences, self.length, self.finished,
            self.arguments["input_ids"], self.cache.position, self.arguments.get("position_ids"), self._scratch,
        )  # fmt: skip


class _Step:
    """A step of the session that holds this: it runs as it is the first time, is then recorded, and is replayed from
    then on. Where it cannot be recorded it goes on as at first.

    Args:
        weights: what it reads of the model, which must stay where it is.
    """

    def __init__(self, asked: Request, fixed: _Fixed, plans: Any, pool: Pool | None, weights: list[Tensor]):
        self._asked, self._fixed, self._plans, self._pool, self._weights = asked, fixed, plans, pool, weights
        self._replay: Callable[[], None] | None = None
        self._has_run = False

    def run(self, session: Session) -> None:
        """The step of ``session``, which is not kept: the two would hold the weights, and each other."""
        call = partial(session.run, self._asked, self._fixed, self._plans)
        if self._replay is None and self._has_run and self._pool is not None:
            try:
                self._replay = Repeated(call, self._pool).replay
            except (Unrecordable, torch.OutOfMemoryError):
                self._pool = None
        if self._asked.do_sample:
            session.draw()
        (self._replay or call)()
        self._has_run = True


def _leaves(variant: Variant, batch: int, capacity: int) -> list[Any]:
    """Arguments of a step, of zeros."""
    guard = variant.region.guard
    sizes = {place: capacity for places in guard.free.values() for place in places}
    sizes |= dict.fromkeys(guard.free.get("batch", ()), batch)
    leaves: list[Any] = [None] * len(variant.region.inputs)
    for index, value in guard.constants:
        leaves[index] = value
    for tensor in guard.tensors:
        shape = [sizes.get((tensor.index, dimension), size) for dimension, size in enumerate(tensor.sizes)]
        leaves[tensor.index] = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    return leaves
