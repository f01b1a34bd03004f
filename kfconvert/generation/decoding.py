"""``generate`` of a converted model: by transformers, with a loop of our own where that can do what is asked for."""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..inputs import capacity_for
from ..runtime import OfConversion, Pool, Variant, WeakModule, can_record, guarded_forward, has_hooks
from .request import NotServed, Request, request
from .session import Session

# A cache first has room for the prompt and so many new tokens, then for twice as many as before.
FIRST_ROOM = 256
# After so many steps it is looked whether all rows are finished, for which the host waits for the device.
STEPS_BETWEEN = 8
# Of so many batch sizes and capacities the caches are kept, those that were used last.
MOST_SESSIONS = 4
# After so many seconds it is looked what the call is at that one waits for.
_LOOK_SECONDS = 0.01
# Arguments of ``generate`` that come before those of ``_FOR_TRANSFORMERS`` and the streamer, without names.
_BY_PLACE = 5
# With these, ``generate`` makes other calls of the model, or needs what it does not hand to a loop of ours.
_FOR_TRANSFORMERS = (
    "custom_generate",
    "assistant_model",
    "synced_gpus",
    "tokenizer",
    "assistant_tokenizer",
)
# Of its configuration: what is not greedy search or sampling.
_OTHER_MODES = {
    name: plain
    for names, plain in (
        (("num_beams", "num_beam_groups"), (None, 1)),
        (("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "constraints", "force_words_ids"), (None,)),
        (("assistant_early_exit", "cache_implementation", "use_mtp"), (None, False)),
    )
    for name in names
}
# Where the methods are that transformers' loop calls, and the packages that may decorate them.
_LOOPS = "transformers.generation.utils"
_DECORATE = ("torch.", "transformers.", "contextlib")


class Generate(OfConversion):
    """Stands as ``generate`` in the instance dict of a converted model.

    ``served`` counts the calls whose steps were those of a program on a static cache, ``others`` those that
    transformers' own loop has run, by the reason.
    """

    __name__ = "generate"

    def __init__(self, model: nn.Module):
        self._begin(WeakModule(model), type(model))

    def _begin(self, model: WeakModule, kind: Any) -> None:
        self._model, self._kind = model, kind
        # Who asks for help gets that of the method in whose place this stands.
        self.__doc__ = kind.generate.__doc__
        signature = inspect.signature(kind.generate)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        self._lock = threading.Lock()
        # Whether the call that has the lock tells a streamer or asks criteria, which may do anything meanwhile.
        self._tells = False
        self._sessions: OrderedDict[tuple[int, int], Session] = OrderedDict()
        # One for all sessions, which take turns: the memory of those that are gone would stay set aside for theirs.
        self._pools: dict[torch.device, Pool] = {}
        self.served = 0
        self.others: Counter[str] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model: Any = self._model()
        plain = type(model).generate
        reason = self._refusal(model, args, kwargs)
        if reason is not None:
            self.others[reason] += 1
            return plain(model, *args, **kwargs)
        # It does not hand its streamer to a loop that it does not know.
        decode = partial(self._decode, streamer=kwargs.get("streamer"))
        return plain(model, *args, custom_generate=decode, **kwargs)

    def info(self) -> dict[str, Any]:
        """``served``: how many calls of ``generate`` were decoded step by step in a recording; ``others``: how many
        were not, by the reason; ``sessions``: of how many batch sizes and capacities there are caches now."""
        return {"served": self.served, "others": dict(self.others), "sessions": len(self._sessions)}

    def __getstate__(self) -> dict[str, Any]:
        return {"_model": self._model, "_kind": self._kind}  # a copy makes its own caches

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["_model"], state["_kind"])

    def reset_counters(self) -> None:
        self.served = 0
        self.others.clear()

    def _refusal(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """Why this call goes to transformers as it is."""
        named = [name for name in _FOR_TRANSFORMERS if kwargs.get(name) is not None]
        if named or len(args) > _BY_PLACE:
            return f"it is given {named[0] if named else 'too many arguments by position'}"
        config = kwargs.get("generation_config", args[1] if len(args) > 1 else None) or model.generation_config
        for name, plain in _OTHER_MODES.items():
            value = kwargs.get(name)
            if (getattr(config, name, None) if value is None else value) not in plain:
                return f"it is given {name}"
        own = vars(model).keys() - {"generate"}  # which is this
        for name in _of_loop():
            if name in own or not _is_of_transformers(type(model), name):
                return f"it has a {name} of its own"
        guarded = guarded_forward(model)
        if guarded is None:
            return "its forward was replaced, as by a compiler"
        if not any(map(_makes_steps, guarded.variants)):
            return "it was pickled, which does not keep fused programs"
        return None

    def _decode(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """A loop as ``generate`` calls it (its ``custom_generate``): the prompt and the new tokens, [batch, length]."""
        told = None
        try:
            asked = request(
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, model_kwargs
            )
            told = _Told(asked, streamer)
            with self._taking_turns(told):
                tokens = self._tokens(model, asked, told, input_ids, model_kwargs)
            self.served += 1
            return tokens
        except NotServed as reason:
            self.others[str(reason)] += 1
        return type(model)._sample(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=_asked_after(stopping_criteria, told.answers if told else []),
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer and _After(streamer, told.count if told else 0),
            **model_kwargs,
        )

    @contextmanager
    def _taking_turns(self, told: _Told) -> Iterator[None]:
        """Within the block no other call uses the sessions. Raises NotServed where one does whose streamer or criteria
        take what time they like: they may have made this call, or wait for it."""
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            if self._tells:
                raise NotServed("a streamer or criterion of another call is told meanwhile")
        self._tells = told.is_wanted
        try:
            yield
        finally:
            self._tells = False
            self._lock.release()

    def _tokens(
        self, model: Any, asked: Request, told: _Told, input_ids: Tensor, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Raises NotServed where the model is not, or no more, as its program has it; nothing has happened then, but
        that others have been ``told`` of tokens."""
        batch, length = input_ids.shape
        # What the model writes to its cache must not be there for another loop.
        model_kwargs = {**model_kwargs, "past_key_values": copy.deepcopy(model_kwargs["past_key_values"])}
        if asked.max_length - length < 2:
            raise NotServed("it is to make a single token")
        session = self._session(model, batch, min(asked.max_length, length + FIRST_ROOM))
        self._ready(model, session)
        inputs = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **model_kwargs)
        outputs = model(**inputs, return_dict=True)
        generator = _generator(session.device) if asked.do_sample else None
        before = None if generator is None else generator.get_state()
        session.begin(asked, input_ids, model_kwargs, outputs.past_key_values, outputs.logits[:, -1])
        del outputs, inputs
        try:
            return self._continued(model, asked, told, session, length + 1, generator)
        except NotServed:
            if generator is not None and before is not None:
                generator.set_state(before)
            raise

    def _continued(
        self, model: Any, asked: Request, told: _Told, session: Session, made: int, generator: torch.Generator | None
    ) -> Tensor:
        """As ``_tokens``, of which so many, with those of the prompt, are in the ``session``."""
        states: list[Tensor] = []  # of the generator, before each step of the last few
        is_over = told.is_wanted and told.of(session, made)
        while made < asked.max_length and not is_over:
            if made >= session.capacity:
                larger = self._session(model, session.batch, min(asked.max_length, 2 * session.capacity))
                session.grown(larger)
                session = larger
            self._ready(model, session)
            step = session.step(asked)
            several = STEPS_BETWEEN if session.pool is not None and not told.is_wanted else 1
            end = min(made + several, asked.max_length, session.capacity)
            del states[:]
            for _ in range(end - made):
                if generator is not None:
                    states.append(generator.get_state())
                step()
            made = end
            is_over = told.of(session, made)
        if asked.do_sample and session.is_undrawable:
            # As torch.multinomial says it, in transformers' loop at once.
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        told.end()
        count = int(session.length)
        if generator is not None and count < made:  # no more numbers are drawn than are needed
            generator.set_state(states[count - made])
        return session.sequences[:, :count].clone()

    def _ready(self, model: Any, session: Session) -> None:
        """Raises NotServed where the program does not hold for the model as it is now, or a step would leave out what
        a call of the model does around its forward."""
        guarded = guarded_forward(model)
        if guarded is None:
            raise NotServed("it has no program any more")
        hooked = "it has hooks, which are to be called in each step" if has_hooks(model) else None
        reason = hooked or guarded.refusal_of(session.variant, session.leaves)
        if reason is not None:
            raise NotServed(reason)

    def _session(self, model: Any, batch: int, tokens: int) -> Session:
        """One with room for so many tokens."""
        key = batch, capacity_for(tokens)
        guarded = guarded_forward(model)
        variant = next(filter(_makes_steps, guarded.variants if guarded else ()), None)
        if variant is None:
            raise NotServed("it has no program any more")
        session = self._sessions.pop(key, None)
        if session is None or session.variant is not variant:
            try:
                session = Session(variant, *key, self._pool_on(model.device))
            except torch.OutOfMemoryError:
                self._sessions.clear()
                raise NotServed("there is too little memory for a static cache") from None
        self._sessions[key] = session
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        return session

    def _pool_on(self, device: torch.device) -> Pool | None:
        if device not in self._pools and can_record(device):
            self._pools[device] = Pool(device)
        return self._pools.get(device)


class _Told:
    """Tells a streamer, and asks stopping criteria that are not known here, after each token.

    ``count``: of how many tokens the streamer has been told; ``answers`` are those of the criteria.
    """

    def __init__(self, asked: Request, streamer: Any):
        self._asked, self._streamer = asked, streamer
        self.count = 0
        self.answers: list[Any] = []

    @property
    def is_wanted(self) -> bool:
        return self._streamer is not None or self._asked.criteria is not None

    def of(self, session: Session, made: int) -> bool:
        """Whether all rows are finished, now that there are so many tokens of each. Raises NotServed where criteria do
        not answer for each row."""
        criteria = self._asked.criteria
        if criteria is not None:
            tokens = session.sequences[:, :made].clone()
            version = tokens._version
            self.answers.append(criteria(tokens, None))
            if tokens._version != version:  # a criterion may choose a token itself
                session.take_over(tokens)
            if getattr(self.answers[-1], "shape", None) != session.finished.shape:
                raise NotServed("its stopping criteria do not answer for each row")
            session.finished.logical_or_(self.answers[-1])
        if self._streamer is not None:
            self._streamer.put(session.sequences[:, made - 1].to("cpu", copy=True))
            self.count += 1
        return bool((self._asked.ends or criteria is not None) and session.finished.all())

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


class _After:
    """A streamer that has had the first tokens already, so many as ``count``."""

    def __init__(self, streamer: Any, count: int):
        self._streamer, self._count = streamer, count

    def put(self, tokens: Tensor) -> None:
        if self._count == 0:
            self._streamer.put(tokens)
        self._count = max(self._count - 1, 0)

    def end(self) -> None:
        self._streamer.end()


def _asked_after(criteria: Any, answers: list[Any]) -> Any:
    """The ``criteria``, which have given these ``answers`` already."""
    if not answers:
        return criteria
    own, left = type(criteria), iter(answers)

    class Again(own):  # type: ignore[misc, valid-type]  # a list, whose items are asked for their attributes
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            known = next(left, None)
            return super().__call__(*args, **kwargs) if known is None else known

    return Again(criteria)


def _generator(device: torch.device) -> torch.Generator:
    """The one that all random operators on ``device`` use."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


@functools.cache
def _of_loop() -> tuple[str, ...]:
    """The methods of a model by which transformers generates greedily or samples: ``generate``, its loop, and those
    that the loop calls."""
    mixin = importlib.import_module(_LOOPS).GenerationMixin
    called = inspect.unwrap(mixin._sample).__code__.co_names
    return ("generate", "_sample", *sorted(name for name in called if inspect.isfunction(vars(mixin).get(name))))


def _is_of_transformers(kind: type, name: str) -> bool:
    """Whether instances of a class have the method that transformers' mixin has under that ``name``."""
    found: Any = getattr(kind, name, None)
    while hasattr(found, "__wrapped__"):
        if not str(getattr(found, "__globals__", {}).get("__name__")).startswith(_DECORATE):
            return False
        found = found.__wrapped__
    code = getattr(found, "__code__", None)
    return code is not None and code.co_filename == importlib.import_module(_LOOPS).__file__


def _makes_steps(variant: Variant) -> bool:
    return variant.region.takes_static_cache


def install_generate(model: nn.Module) -> Generate | None:
    """Let ``model``, which has its guarded forward, generate by its program for steps; None where it has none."""
    guarded = guarded_forward(model)
    if guarded is None or not any(map(_makes_steps, guarded.variants)) or "generate" in vars(model):
        return None
    generate = Generate(model)
    model.__dict__["generate"] = generate
    return generate
