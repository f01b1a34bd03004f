"""``generate`` of a converted model: transformers' ``generate``, with a custom loop if it supports the call."""

from __future__ import annotations

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

from ..inputs import capacity_for, keep_apart, twin
from ..runtime import OfConversion, Pool, Variant, WeakModule, can_record, guarded_forward, has_hooks
from .request import CACHES, NotServed, Request, request
from .session import Session, source_of

# A cache first has room for the prompt and this number of new tokens, then twice as many each time.
FIRST_ROOM = 256
# Number of steps between checks whether all rows have finished. The answer is read after the next steps are launched,
# so that the device never waits for the host.
STEPS_BETWEEN = 4
# Number of recently used combinations of batch size and capacities whose caches are kept.
MOST_SESSIONS = 4
# Seconds to wait before checking what the running call is doing.
_LOOK_SECONDS = 0.01
# Positional arguments of ``generate`` before those of ``_FOR_TRANSFORMERS`` and the streamer.
_BY_PLACE = 5
# With these arguments, ``generate`` makes other calls of the model, or needs values that a custom loop does not get.
_FOR_TRANSFORMERS = ("custom_generate", "assistant_model", "synced_gpus", "tokenizer", "assistant_tokenizer")
# Configuration entries that select other modes than greedy search or sampling.
_OTHER_MODES = {
    name: plain
    for names, plain in (
        (("num_beams", "num_beam_groups"), (None, 1)),
        (("penalty_alpha", "dola_layers", "prompt_lookup_num_tokens", "constraints", "force_words_ids"), (None,)),
        (("assistant_early_exit", "cache_implementation", "use_mtp"), (None, False)),
    )
    for name in names
}
# The modules of methods that transformers' loop calls, and packages that may decorate them.
_LOOPS = "transformers.generation.utils"
_DECORATE = ("torch.", "transformers.", "contextlib")
# The models of transformers with a ``generate`` that calls the mixin's, with the same further arguments.
_CALL_MIXIN = frozenset(("whisper",))
# The models of transformers with a ``prepare_inputs_for_generation`` that makes other arguments only for prompts and
# for transformers' static cache, or arguments that are equal in all steps. Those of Phi 3 differ beyond a length, and
# those of Whisper with a mask of the decoder.
_SAME_STEPS = frozenset(
    "bamba bloom falcon_h1 falcon_mamba gemma3 mamba mamba2 nemotron_h phi3 phimoe whisper zamba zamba2".split()
)


class Generate(OfConversion):
    """Replaces ``generate`` in the instance dict of a converted model.

    ``served`` counts calls whose steps ran as a program with a static cache. ``others`` counts calls in transformers'
    loop, by reason.
    """

    __name__ = "generate"

    def __init__(self, model: nn.Module):
        self._begin(WeakModule(model), type(model))

    def _begin(self, model: WeakModule, kind: Any) -> None:
        self._model, self._kind = model, kind
        # help() shows the replaced method.
        self.__doc__ = kind.generate.__doc__
        signature = inspect.signature(kind.generate)
        self.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])
        self._lock = threading.Lock()
        # Whether the call with the lock runs a streamer or criteria, which may do anything.
        self._has_listeners = False
        self._sessions: OrderedDict[tuple[int, int, int], Session] = OrderedDict()
        # One pool for all sessions, which take turns. Separate pools would keep the memory of deleted sessions.
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
        # generate does not pass its streamer to a custom loop.
        decode = partial(self._decode, streamer=kwargs.get("streamer"))
        return plain(model, *args, custom_generate=decode, **kwargs)

    def info(self) -> dict[str, Any]:
        """Returns ``served``, the number of ``generate`` calls with recorded steps; ``others``, the numbers of other
        calls by reason; ``sessions``, the number of combinations of batch size and capacities with caches."""
        return {"served": self.served, "others": dict(self.others), "sessions": len(self._sessions)}

    def __getstate__(self) -> dict[str, Any]:
        return {"_model": self._model, "_kind": self._kind}  # a copy creates new caches

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._begin(state["_model"], state["_kind"])

    def reset_counters(self) -> None:
        self.served = 0
        self.others.clear()

    def _refusal(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> str | None:
        """The reason to pass this call to transformers unchanged, or None."""
        named = [name for name in _FOR_TRANSFORMERS if kwargs.get(name) is not None]
        if named or len(args) > _BY_PLACE:
            return f"the call passes {named[0] if named else 'too many positional arguments'}"
        config = kwargs.get("generation_config", args[1] if len(args) > 1 else None) or model.generation_config
        for name, plain in _OTHER_MODES.items():
            value = kwargs.get(name)
            if (getattr(config, name, None) if value is None else value) not in plain:
                return f"the call sets {name}"
        own = vars(model).keys() - {"generate"}  # this object
        overridden = next((name for name in _of_loop() if name in own), None) or _overridden(type(model))
        if overridden is not None:
            return f"it overrides {overridden}"
        guarded = guarded_forward(model)
        if guarded is None:
            return "its forward was replaced, for example by a compiler"
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
        """Runs as ``custom_generate`` of ``generate`` and returns the prompt and the new tokens, [batch, length].

        Raises:
            RuntimeError: the program stopped being valid after a streamer or criterion has received tokens.
        """
        listeners = None
        try:
            asked = request(
                input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, model_kwargs
            )
            listeners = _Listeners(asked, streamer)
            with self._taking_turns(listeners):
                tokens = self._tokens(model, asked, listeners, input_ids, generation_config, model_kwargs)
            self.served += 1
            if not generation_config.return_dict_in_generate:
                return tokens
            output = importlib.import_module(_LOOPS).GenerateDecoderOnlyOutput
            cache = next(model_kwargs[name] for name in CACHES if name in model_kwargs)
            return output(sequences=tokens, past_key_values=cache)
        except NotServed as reason:
            if listeners is not None and listeners.have_heard:
                raise RuntimeError(
                    f"generate() cannot continue, because a streamer or criterion has already received tokens: {reason}"
                ) from reason
            self.others[str(reason)] += 1
        return type(model)._sample(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )

    @contextmanager
    def _taking_turns(self, listeners: _Listeners) -> Iterator[None]:
        """Context manager in which no other call uses the sessions. Raises NotServed if another call runs a streamer or
        criteria of unknown duration, which may have made this call, or wait for it."""
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            if self._has_listeners:
                raise NotServed("a streamer or criterion of another call is running")
        self._has_listeners = listeners.are_wanted
        try:
            yield
        finally:
            self._has_listeners = False
            self._lock.release()

    def _tokens(
        self,
        model: Any,
        asked: Request,
        listeners: _Listeners,
        input_ids: Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
    ) -> Tensor:
        """Returns the tokens, and writes to the cache in ``model_kwargs`` if the caller receives it.

        Raises NotServed if the model has changed since its program was created. In this case the only side effect is
        that the ``listeners`` have received tokens.
        """
        batch, length = input_ids.shape
        # Another loop must not see the tokens that the model writes to its cache.
        cache = model_kwargs[asked.cache]
        model_kwargs = {**model_kwargs, asked.cache: twin(cache)}
        keep_apart(model_kwargs[asked.cache])
        if asked.max_length - length < 2:
            raise NotServed("it generates a single token")
        first = getattr(model.config, "original_max_position_embeddings", None)
        if first is not None and asked.max_length > first:
            raise NotServed(f"the model computes other angles beyond {first} tokens")
        if model.config.model_type == "whisper" and model_kwargs.get("decoder_attention_mask") is not None:
            raise NotServed("the positions of its tokens depend on a mask")
        source = capacity_for(source_of(model_kwargs))
        session = self._session(model, batch, min(asked.max_length, length + FIRST_ROOM), source)
        self._ready(model, session)
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        generator = _generator(session.device) if asked.do_sample else None
        before = None if generator is None else generator.get_state()
        filled = getattr(outputs, asked.cache)
        session.begin(asked, input_ids, model_kwargs, filled, outputs.logits[:, -1])
        kept = filled if asked.returns_cache else None
        del outputs, filled, model_kwargs
        try:
            session, count = self._continued(model, asked, listeners, session, length + 1, generator)
        except NotServed:
            if generator is not None and before is not None:
                generator.set_state(before)
            raise
        if kept is not None:
            session.hand_back(kept, count - 1)
            for layer, written in zip(cache.layers, kept.layers):
                vars(layer).update(vars(written))
            cache.layers += kept.layers[len(cache.layers) :]
        return session.sequences[:, :count].clone()

    def _continued(
        self,
        model: Any,
        asked: Request,
        listeners: _Listeners,
        session: Session,
        made: int,
        generator: torch.Generator | None,
    ) -> tuple[Session, int]:
        """Continues ``_tokens`` with ``made`` tokens, including the prompt, in the ``session``. Returns the last
        session and its number of tokens."""
        states: list[Tensor] = []  # of the generator, before each of the last steps
        is_over = listeners.are_wanted and listeners.hear(session, made)
        late = _LateAnswer() if asked.ends and session.pool is not None else None
        while made < asked.max_length and not is_over:
            if made >= session.capacity:
                room = min(asked.max_length, 2 * session.capacity)
                larger = self._session(model, session.batch, room, session.source)
                session.grown(larger)
                session = larger
            self._ready(model, session)
            step = session.step(asked)
            # Recurrent states of a cache to return must not include tokens after the end of all rows.
            singly = session.pool is None or listeners.are_wanted or (asked.returns_cache and session.is_recurrent)
            several = 1 if singly else STEPS_BETWEEN
            end = min(made + several, asked.max_length, session.capacity)
            del states[:-STEPS_BETWEEN]
            for _ in range(end - made):
                if generator is not None:
                    states.append(generator.get_state())
                step()
            made = end
            if singly or late is None:
                is_over = listeners.hear(session, made)
            else:
                is_over = late.was_true()
                late.ask(session.finished.all())
        if asked.do_sample and session.is_undrawable:
            # The message of torch.multinomial, which transformers' loop raises immediately.
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        listeners.end()
        count = int(session.length)
        if generator is not None and count < made:  # restore the state after the last needed draw
            generator.set_state(states[count - made])
        return session, count

    def _ready(self, model: Any, session: Session) -> None:
        """Raises NotServed if the program is not valid for the current model, or a step would skip hooks of the
        model."""
        guarded = guarded_forward(model)
        if guarded is None:
            raise NotServed("its program was dropped")
        hooked = "it has hooks, which must run in each step" if has_hooks(model) else None
        reason = hooked or guarded.refusal_of(session.variant, session.leaves)
        if reason is not None:
            raise NotServed(reason)

    def _session(self, model: Any, batch: int, tokens: int, source: int) -> Session:
        """Returns a session with room for ``tokens`` tokens, and ``source`` tokens of an encoder."""
        key = batch, capacity_for(tokens), source
        guarded = guarded_forward(model)
        variant = next(filter(_makes_steps, guarded.variants if guarded else ()), None)
        if variant is None:
            raise NotServed("its program was dropped")
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


class _Listeners:
    """The streamer and the unknown stopping criteria of a call, which receive each token."""

    def __init__(self, asked: Request, streamer: Any):
        self._asked, self._streamer = asked, streamer
        self.are_wanted = streamer is not None or asked.criteria is not None
        self.have_heard = False

    def hear(self, session: Session, made: int) -> bool:
        """Passes on the last of ``made`` tokens, and returns whether all rows have finished."""
        self.have_heard |= self.are_wanted
        criteria = self._asked.criteria
        if criteria is not None:
            tokens = session.sequences[:, :made].clone()
            session.finished.logical_or_(criteria(tokens, None))
            session.take_over(tokens)  # a criterion may have changed a token
        if self._streamer is not None:
            self._streamer.put(session.sequences[:, made - 1].to("cpu", copy=True))
        return bool((self._asked.ends or criteria is not None) and session.finished.all())

    def end(self) -> None:
        if self._streamer is not None:
            self._streamer.end()


class _LateAnswer:
    """The value of a boolean on the device, read after later work was launched."""

    def __init__(self) -> None:
        self._value = torch.zeros((), dtype=torch.bool, pin_memory=True)
        self._event = torch.cuda.Event()

    def ask(self, value: Tensor) -> None:
        """Begins to copy ``value`` to the host."""
        self._value.copy_(value, non_blocking=True)
        self._event.record(torch.cuda.current_stream(value.device))

    def was_true(self) -> bool:
        """Waits for the last value, and returns it; False before the first."""
        self._event.synchronize()
        return bool(self._value)


def _generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


@functools.cache
def _of_loop() -> tuple[str, ...]:
    """The methods of transformers' greedy search and sampling: ``generate``, its loop, and methods that the loop
    calls."""
    mixin = importlib.import_module(_LOOPS).GenerationMixin
    called = inspect.unwrap(mixin._sample).__code__.co_names
    return ("generate", "_sample", *sorted(name for name in called if inspect.isfunction(vars(mixin).get(name))))


def runs_usual_loop(model: nn.Module) -> bool:
    """Whether ``generate`` of ``model`` runs transformers' loop, which recorded steps can replace."""
    has_loop = any(base.__module__ == _LOOPS for base in type(model).__mro__)
    return has_loop and _overridden(type(model)) is None


def selects_other_mode(model: Any) -> bool:
    """Whether ``generate`` of ``model`` without arguments runs beams or another mode that the loop does not serve."""
    config = getattr(model, "generation_config", None)
    return any(getattr(config, name, None) not in plain for name, plain in _OTHER_MODES.items())


def _overridden(kind: type) -> str | None:
    """The first method of the loop that a class overrides in a way that may change its steps."""
    return next((name for name in _of_loop() if not _is_of_transformers(kind, name)), None)


def _is_of_transformers(kind: type, name: str) -> bool:
    """Whether a class inherits the method ``name`` of transformers' mixin, or has an override with the same steps."""
    found: Any = getattr(kind, name, None)
    while hasattr(found, "__wrapped__"):
        if not str(getattr(found, "__globals__", {}).get("__name__")).startswith(_DECORATE):
            return False
        found = found.__wrapped__
    code = getattr(found, "__code__", None)
    if code is None:
        return False
    package = found.__globals__["__name__"].split(".")
    known = {"prepare_inputs_for_generation": _SAME_STEPS, "generate": _CALL_MIXIN}
    if name in known and package[:2] == ["transformers", "models"]:
        return package[2] in known[name]
    return code.co_filename == importlib.import_module(_LOOPS).__file__


def _makes_steps(variant: Variant) -> bool:
    return variant.region.takes_static_cache


def install_generate(model: nn.Module) -> Generate | None:
    """Installs ``generate`` on ``model``, which has its guarded forward. Returns None without a program for steps."""
    guarded = guarded_forward(model)
    if guarded is None or not any(map(_makes_steps, guarded.variants)) or "generate" in vars(model):
        return None
    generate = Generate(model)
    model.__dict__["generate"] = generate
    return generate
