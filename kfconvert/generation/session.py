"""The tensors of generation steps, which recordings read and write in place, and these recordings."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import next_token_
from ..runtime import Pool, Repeated, Unrecordable, Variant, library_switches
from .request import Request

# Maximum number of recordings (ways to select tokens) with the same tensors.
MOST_RECORDINGS = 4


class _Fixed(NamedTuple):
    """Values that are constant in all steps of a request, and are computed outside of recordings."""

    endings: dict[int, Tensor]
    ends: Tensor | None


class Session:
    """Generates for one batch size with a cache of one capacity, one request at a time.

    The addresses of all tensors stay fixed. In each row of ``sequences`` [batch, capacity + 1], int64, the first
    ``length`` (int64, shape [1]) are tokens, and the rest is padded with the first token. Random numbers are drawn
    before each step, so that recordings draw none.

    Args:
        pool: memory pool of the recordings; None without recordings.
    """

    def __init__(self, variant: Variant, batch: int, capacity: int, pool: Pool | None):
        self.variant, self.batch, self.capacity, self.pool = variant, batch, capacity, pool
        # Tensors created under inference_mode cannot be written outside of it.
        with torch.inference_mode(False):
            self.leaves = _leaves(variant, batch, capacity)
            self.arguments = variant.region.call.keywords(self.leaves)
            self.cache = self.arguments["past_key_values"]
            self.device: torch.device = self.arguments["input_ids"].device
            new = partial(torch.zeros, device=self.device)
            self.sequences = new(batch, capacity + 1, dtype=torch.long)
            self.length, self.least = new(1, dtype=torch.long), new(1, dtype=torch.long)
            self.finished = new(batch, dtype=torch.bool)
            # Whether a token was drawn from scores with NaN.
            self.is_undrawable = new(1, dtype=torch.bool)
            self._scratch = new(batch + 1, dtype=torch.long)
        self._noise: Tensor | None = None
        # Size of the vocabulary, set by the first request.
        self._words = 0
        self._plans: Any = None
        self._steps: dict[Hashable, _Step] = {}
        self._known: dict[Hashable, _Fixed] = {}

    def begin(self, asked: Request, input_ids: Tensor, of_model: dict[str, Any], filled: Any, logits: Tensor) -> None:
        """Starts from a prompt that the model has processed.

        Args:
            input_ids: its tokens, [batch, length].
            of_model: arguments of the model call.
            filled: the ``DynamicCache`` that the model filled.
            logits: logits of the last token, [batch, words].
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
        # A layer with a window drops only tokens outside of the window.
        places = [slice(length - source.shape[2], length) for source in found]
        torch._foreach_copy_([target[:, :, place] for target, place in zip(held, places)], found)
        # The next step increments it.
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
        """Copies the state to ``larger``, which continues."""
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
        """Sets the tokens of the rows to ``tokens`` [batch, length], the last of which is the next input."""
        self.sequences[:, : tokens.shape[1]] = tokens
        self.arguments["input_ids"].copy_(tokens[:, -1:])

    def step(self, asked: Request) -> Callable[[], None]:
        """Returns a function that computes the next token of each row, and is recorded from its second call on. Call
        this again after the model may have changed. Raises UnfitTensors."""
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
        """Draws the random numbers of the next step, if it needs any."""
        if self._noise is not None:
            self._noise.exponential_(1)

    def _fixed(self, asked: Request) -> _Fixed:
        words, device = self._words, self.device
        key = words, asked.key
        if key not in self._known:
            if len(self._known) >= MOST_RECORDINGS:
                self._known.clear()
            ends = torch.tensor(asked.ends, device=device) if asked.ends else None
            self._known[key] = _Fixed(asked.endings(words, device), ends)
        return self._known[key]

    def run(self, asked: Request, fixed: _Fixed, plans: Any) -> None:
        """Launches a step with ``plans``."""
        flat = self.variant.program.computed(plans, self.leaves)
        cache = type(self.cache)(self.cache.tensors())
        outputs = self.variant.region.outputs.put_together(flat, [cache])
        for held, written in zip(self.cache.tensors(), cache.tensors()):
            if written.data_ptr() != held.data_ptr():
                held.copy_(written)
        self._take(asked, fixed, outputs.logits[:, -1])

    def _take(self, asked: Request, fixed: _Fixed, logits: Tensor) -> None:
        """Selects a token of each row by the ``logits`` [batch, words] of its last token, and sets the next input."""
        scores = asked.scores(self.sequences, self.length, self.least, logits, fixed.endings)
        if asked.do_sample and self._noise is not None:
            scores = asked.drawn(scores, self._noise)
            # Either all or no probabilities of a row are NaN.
            self.is_undrawable.logical_or_(scores[:, 0].isnan().any())
        next_token_(
            scores, None, self.least, fixed.ends, asked.pad, self.sequences, self.length, self.finished,
            self.arguments["input_ids"], self.cache.position, self.arguments.get("position_ids"), self._scratch,
        )  # fmt: skip


class _Step:
    """A step of a session: the first call launches it, the second records it, and later calls replay it. If it cannot
    be recorded, all calls launch it.

    Args:
        weights: tensors of the model that the step reads, whose addresses must stay fixed.
    """

    def __init__(self, asked: Request, fixed: _Fixed, plans: Any, pool: Pool | None, weights: list[Tensor]):
        self._asked, self._fixed, self._plans, self._pool, self._weights = asked, fixed, plans, pool, weights
        self._replay: Callable[[], None] | None = None
        self._has_run = False

    def run(self, session: Session) -> None:
        """Runs the step of ``session``. Stores no reference to it, which would be a cycle that keeps weights alive."""
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
