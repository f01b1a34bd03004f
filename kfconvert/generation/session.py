"""The tensors of generation steps, which recordings read and write in place, and these recordings."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..inputs import SEQUENCES, STATES, cache_of_tokens, caches_in, layers_of, set_tensor, tensors_of, twin
from ..ops import next_token_
from ..runtime import Pool, Repeated, Unrecordable, Variant, library_switches
from .request import NotServed, Request

# Maximum number of recordings (ways to select tokens) with the same tensors.
MOST_RECORDINGS = 4
# Maximum number of blocks of a kernel that read the scores of a row.
_PARTS = 16


class Names(NamedTuple):
    """The names of the arguments of a step for its tokens, the mask of all tokens, and the positions of its tokens."""

    ids: str
    mask: str
    positions: str

    @classmethod
    def of(cls, arguments: Iterable[str]) -> Names:
        """Returns the names for a model with these arguments: an encoder-decoder, or another model."""
        prefix = "decoder_" if "decoder_input_ids" in arguments else ""
        return cls(*(prefix + name for name in ("input_ids", "attention_mask", "position_ids")))


class _Fixed(NamedTuple):
    """Values that are constant in all steps of a request, and are computed outside of recordings."""

    forbidden: dict[int, Tensor]
    ends: Tensor | None


class Session:
    """Generates for one batch size with a cache of one capacity, one request at a time.

    The addresses of all tensors stay fixed. In each row of ``sequences`` [batch, capacity + 1], int64, the first
    ``length`` (int64, shape [1]) are tokens, and the rest is padded with the first token. Random numbers are drawn
    before each step, so that recordings draw none.

    Args:
        source: the number of tokens of an encoder for which there is room; 0 without an encoder.
        pool: memory pool of the recordings; None without recordings.
    """

    def __init__(self, variant: Variant, batch: int, capacity: int, source: int, pool: Pool | None):
        self.variant, self.batch, self.capacity, self.source, self.pool = variant, batch, capacity, source, pool
        # Tensors created under inference_mode cannot be written outside of it.
        with torch.inference_mode(False):
            self.arguments = variant.region.call.keywords(_leaves(variant, batch, capacity, source))
            self.names = Names.of(self.arguments)
            # The states of a made cache are copies.
            self.leaves: list[Any] = variant.region.call.leaves((), self.arguments) or []
            (self.cache,) = caches_in(self.arguments.values())
            # The position is the number of tokens in the cache.
            self._position = cache_of_tokens(self.cache).position
            self.is_recurrent = any(name[0] in STATES for each in layers_of(self.cache) for name, _ in tensors_of(each))
            self.device: torch.device = self.arguments[self.names.ids].device
            new = partial(torch.zeros, device=self.device)
            self.sequences = new(batch, capacity + 1, dtype=torch.long)
            self.length, self.least = new(1, dtype=torch.long), new(1, dtype=torch.long)
            self.finished = new(batch, dtype=torch.bool)
            # Whether a token was drawn from scores with NaN.
            self.is_undrawable = new(1, dtype=torch.bool)
            self._scratch = new(2 * batch * _PARTS + 1, dtype=torch.long)
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
            filled: the cache that the model filled. A layer with a window has dropped only tokens outside of it.
            logits: logits of the last token, [batch, words].

        Raises NotServed if an argument has another structure than in the captured step.
        """
        batch, length = input_ids.shape
        self.sequences.copy_(input_ids[:, :1].expand_as(self.sequences))
        self.sequences[:, :length] = input_ids
        self.length.fill_(length)
        self.least.fill_(asked.least)
        self.finished.fill_(False)
        self.is_undrawable.fill_(False)
        held, found = _tensors(self.cache), _tensors(filled)
        torch._foreach_zero_([tensor for _, tensor in held])
        targets = [
            target[:, :, length - source.shape[2] : length] if is_of_tokens else target[:, :, : source.shape[2]]
            for (is_of_tokens, target), (_, source) in zip(held, found, strict=True)
        ]
        torch._foreach_copy_(targets, [source for _, source in found])
        # The next step increments it.
        self._position.fill_(length - 1)
        for name, target in self.arguments.items():
            given = of_model.get(name)
            if name == self.names.mask:
                target.fill_(1)
                if given is not None:
                    target[:, :length] = given
            elif name == self.names.positions:
                last = torch.full((batch, 1), length - 1, device=self.device) if given is None else given[:, -1:]
                target.copy_(last.expand(batch, 1))
            elif name != self.names.ids and target is not self.cache:
                _fill(target, given, source_of(of_model))
        self._words = logits.shape[-1]
        if asked.do_sample:
            self._make_noise()
            self.draw()
        self._take(asked, self._fixed(asked), logits)

    def hand_back(self, cache: Any, length: int) -> None:
        """Writes the first ``length`` positions to ``cache``, the ``DynamicCache`` that the model has filled."""
        for layer, held in zip(cache.layers, self.cache.layers, strict=True):
            first = 0
            if getattr(layer, "is_sliding", False):
                first, layer.cumulative_length = max(0, length - layer.sliding_window + 1), length
            for name, tensor in tensors_of(held):
                set_tensor(layer, name, (tensor[:, :, first:length] if name[0] in SEQUENCES else tensor).clone())

    def grown(self, larger: Session) -> None:
        """Copies the state to ``larger``, which continues."""
        larger.sequences.copy_(self.sequences[:, :1].expand_as(larger.sequences))
        larger.sequences[:, : self.capacity + 1] = self.sequences
        for name in ("length", "least", "finished", "is_undrawable"):
            getattr(larger, name).copy_(getattr(self, name))
        for name, value in self.arguments.items():
            target = larger.arguments[name]
            if name == self.names.mask:
                target.fill_(1)
                target[:, : self.capacity] = value
            elif value is not self.cache:
                _fill(target, value)
        larger._position.copy_(self._position)
        for (is_of_tokens, source), (_, target) in zip(_tensors(self.cache), _tensors(larger.cache)):
            if is_of_tokens:
                target.zero_()
                target = target[:, :, : self.capacity]
            target.copy_(source)
        larger._words = self._words
        if self._noise is not None:
            larger._make_noise()

    def take_over(self, tokens: Tensor) -> None:
        """Sets the tokens of the rows to ``tokens`` [batch, length], the last of which is the next input."""
        self.sequences[:, : tokens.shape[1]] = tokens
        self.arguments[self.names.ids].copy_(tokens[:, -1:])

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
            self._known[key] = _Fixed(asked.forbidden(words, device), ends)
        return self._known[key]

    def run(self, asked: Request, fixed: _Fixed, plans: Any) -> None:
        """Launches a step with ``plans``."""
        flat = self.variant.program.computed(plans, self.leaves)
        cache = twin(self.cache)
        outputs = self.variant.region.outputs.put_together(flat, [cache])
        for (_, held), (_, written) in zip(_tensors(self.cache), _tensors(cache)):
            if written.data_ptr() != held.data_ptr():
                held.copy_(written)
        self._take(asked, fixed, outputs.logits[:, -1])

    def _take(self, asked: Request, fixed: _Fixed, logits: Tensor) -> None:
        """Selects a token of each row by the ``logits`` [batch, words] of its last token, and sets the next input."""
        scores = asked.scores(self.sequences, self.length, self.least, logits, fixed.forbidden)
        if asked.do_sample and self._noise is not None:
            scores = asked.drawn(scores, self._noise)
            # Either all or no probabilities of a row are NaN.
            self.is_undrawable.logical_or_(scores[:, 0].isnan().any())
        next_token_(
            scores, None, self.least, fixed.ends, asked.pad, self.sequences, self.length, self.finished,
            self.arguments[self.names.ids], self._position, self.arguments.get(self.names.positions), self._scratch,
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


def _tensors(cache: Any) -> list[tuple[bool, Tensor]]:
    """The tensors of the layers of a cache, and for each whether its dimension 2 has the tokens of the decoder."""
    of_tokens = set(map(id, layers_of(cache_of_tokens(cache))))
    return [
        (name[0] in SEQUENCES and id(layer) in of_tokens, tensor)
        for layer in layers_of(cache)
        for name, tensor in tensors_of(layer)
    ]


def source_of(of_model: dict[str, Any]) -> int:
    """Returns the number of tokens of the encoder; 0 without an encoder."""
    encoded = of_model.get("encoder_outputs")
    return 0 if encoded is None else encoded[0].shape[1]


def _fill(target: Any, given: Any, source: int = 0) -> None:
    """Copies an argument to the tensors in ``target``, with zeros for missing tokens of an encoder. A missing mask has
    ones for ``source`` tokens."""
    places, spec = pytree.tree_flatten(target)
    if given is None:
        for place in places:
            if isinstance(place, Tensor):
                place.zero_()
                place[:, :source] = 1
        return
    values, other = pytree.tree_flatten(given)
    if spec != other:
        raise NotServed("an argument has another structure than in the captured step")
    for place, value in zip(places, values):
        if isinstance(place, Tensor):
            place.zero_()
            place[tuple(map(slice, value.shape))] = value


def _leaves(variant: Variant, batch: int, capacity: int, source: int) -> list[Any]:
    guard = variant.region.guard
    room = {"batch": batch, "capacity": capacity, "sequence": source}
    sizes = {place: room[name.split()[0]] for name, places in guard.free.items() for place in places}
    leaves: list[Any] = [None] * len(variant.region.inputs)
    for index, value in guard.constants:
        leaves[index] = value
    for tensor in guard.tensors:
        shape = [sizes.get((tensor.index, dimension), size) for dimension, size in enumerate(tensor.sizes)]
        leaves[tensor.index] = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    return leaves
