"""The calls of a model by ``generate``: for the prompt, and for the next token, each with a cache."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..accuracy import is_close
from ..inputs import (
    ExampleCall,
    as_static,
    bounded_lookups,
    cache_of_tokens,
    caches_in,
    capacity_for,
    holds_tokens,
    is_cache,
    is_encoder_decoder,
    is_resident,
    repeated_to,
    tensors_of,
    with_cache_of_tokens,
)
from ..process import quiet_thread
from ..region import CaptureError
from .captured import Capture, attempted, capture
from .deadline import Budget
from .parts import choices
from .trial_runs import TOLERANCES

# The prompt size of traces, in examples and tokens: two different sizes, small for speed.
BATCH, LENGTH = 2, 5
# The prompt call, then three steps. The second and third steps differ in the free sizes, and the lengths of the second
# are at least 2.
CALLS = 4
PROMPT, STEP = 0, 2
# The arguments that a step may have. Only transformers' loop can run other steps.
OF_STEP = frozenset(
    """input_ids attention_mask position_ids past_key_values cache_params use_cache logits_to_keep return_dict
    decoder_input_ids decoder_attention_mask decoder_position_ids encoder_outputs""".split()
)
_MASK, _DECODER_MASK = "attention_mask", "decoder_attention_mask"
# The additional room of the static cache in traces.
SPARE = 8

# Returns the capture from an earlier conversion for the traced call and its example, if there is one.
Known = Callable[[ExampleCall, ExampleCall], Capture | None]
# Returns calls with one other size each, by the name of that size.
Vary = Callable[[], dict[str, ExampleCall]]


class _Enough(Exception):
    """Ends a run of ``generate``."""


@dataclass
class GenerationCall:
    """A call of the model by ``generate`` with a small prompt; ``example``, the same with the prompt of the user's
    example; and for each of both, the same with one other size."""

    call: ExampleCall
    example: ExampleCall
    vary: Vary
    vary_example: Vary | None = None


def capture_generation(
    model: nn.Module,
    call: ExampleCall,
    first: Capture | CaptureError,
    put_back: Callable[[], None],
    static: bool = False,
    fewest: bool = False,
    seconds: float = math.inf,
    known: Known = lambda call, example: None,
) -> list[tuple[ExampleCall, Capture | CaptureError]]:
    """Return ``model`` in each form in which its ``generate`` calls it, or the reason why that form cannot be captured.

    Args:
        call: the example call, which provides the prompt for ``generate``.
        first: the capture of that call. If it failed, or has a fixed number of tokens as after a loop over them, only
            steps are captured. If it returns no cache, only calls without one are captured.
        put_back: restores the state of the model from before a call.
        static: whether to capture the step on a static cache as well (see ``kfconvert.generation``).
        fewest: capture only the forms for greedy decoding: the prompt, and the step on a static cache if requested and
            available, or else on a growing cache. Forms with a mask of padding are added if ``call`` has one, and for
            encoder-decoders.
        seconds: the limit of processor time for each form.
        known: returns the captures that need no trace.
    """
    prompt = prompt_of(model, call, CALLS)
    if prompt is None:
        return []
    found = []
    of_tokens = holds_tokens(prompt) and not is_encoder_decoder(model)
    has_prompts = isinstance(first, Capture) and (not of_tokens or "sequence" in first.region.guard.free)
    has_caches = not isinstance(first, Capture) or first.region.has_caches
    masks = _masks(model, call, fewest)
    for generation in _generation_calls(model, prompt, put_back, static, fewest, masks, has_prompts):
        if not has_caches and caches_in(generation.call.kwargs.values()):
            continue  # calls as the example's are without one
        trace = partial(_captured, model, put_back=put_back, budget=Budget(seconds))
        captured = known(generation.call, generation.example) or attempted(partial(trace, generation))
        if isinstance(captured, CaptureError) and generation.vary_example is not None:
            put_back()
            # With the prompt of the example, for code that differs by length, as beyond a window.
            own = GenerationCall(generation.example, generation.example, generation.vary_example)
            captured = attempted(partial(trace, own))
        found.append((generation.call, captured))
        put_back()
    return found


def _masks(model: nn.Module, call: ExampleCall, fewest: bool) -> tuple[bool, ...]:
    """Whether to capture forms without and with a mask of padding. Encoder-decoders pass on every given mask, even
    without padding; other models of transformers drop a mask of ones."""
    is_padded = _arguments(model, call).get(_MASK) is not None
    return (False, True) if is_padded or not fewest or is_encoder_decoder(model) else (False,)


def _generation_calls(
    model: nn.Module,
    prompt: Tensor,
    put_back: Callable[[], None],
    static: bool,
    fewest: bool,
    masks: tuple[bool, ...],
    prompts: bool,
) -> list[GenerationCall]:
    """The calls of ``model.generate`` for the ``prompt``, with each of the ``masks``, and its step on a static cache if
    requested; only the steps without ``prompts``; none where the method raises."""
    observed: dict[bool, list[GenerationCall]] = {}
    on_static = None
    # The step on a static cache needs a mask. transformers may drop a mask of ones, and with it that of unused entries.
    for masked in sorted({*masks, True} if static else masks, reverse=True):
        try:
            observed[masked] = _observed(model, prompt, masked, fewest and on_static is not None)
            if static and masked and observed[masked]:
                on_static = _on_static_cache(model, observed[masked][-1])
        except Exception:  # its configuration may have any effect
            continue
        finally:
            put_back()
    wanted = [observed[masked] for masked in masks if masked in observed]
    if fewest and on_static:
        wanted = [calls[:1] for calls in wanted]
    if not prompts:
        wanted = [calls[1:] for calls in wanted]
    found: dict[Any, GenerationCall] = {}
    for calls in wanted:
        for place, each in enumerate(calls):
            # The model may not pass the mask on, and then makes the same call as without one.
            given = (name for name, value in each.call.kwargs.items() if value is not None)
            found.setdefault((place, *given), each)
    return [*found.values(), *([on_static] if on_static else [])]


def _on_static_cache(model: nn.Module, step: GenerationCall) -> GenerationCall | None:
    """Return ``step`` with a static cache as its cache; None where the model then computes different outputs."""
    if is_encoder_decoder(model):
        step = _changed(step, _with_mask)
    call, example = _static(step.call, SPARE), _static(step.example)
    if call is None or example is None:
        return None
    with torch.no_grad():
        logits, others = (each(model).logits for each in (step.call, call))
    if not is_close(logits, others, TOLERANCES):
        return None

    def vary() -> dict[str, ExampleCall]:
        varied = {name: _static(each, SPARE) for name, each in step.vary().items() if name != "step"}
        varied = {"batch": varied.pop("batch"), "capacity": _static(step.call, SPARE + 1), **varied}
        return {name: each for name, each in varied.items() if each is not None}

    return GenerationCall(call, example, vary)


def _changed(step: GenerationCall, change: Callable[[ExampleCall], ExampleCall]) -> GenerationCall:
    vary = step.vary
    return GenerationCall(
        change(step.call), change(step.example), lambda: {name: change(each) for name, each in vary().items()}
    )


def _with_mask(step: ExampleCall) -> ExampleCall:
    """Return a ``step`` of an encoder-decoder with a mask of the decoder's tokens, of which one is hidden: transformers
    may drop a mask of ones."""
    past = next((value for value in step.kwargs.values() if is_cache(value)), None)
    ids = step.kwargs.get("decoder_input_ids")
    if past is None or ids is None or step.kwargs.get(_DECODER_MASK) is not None:
        return step
    mask = torch.ones(ids.shape[0], past.get_seq_length() + 1, dtype=torch.long, device=ids.device)
    mask[0, 0] = 0
    return ExampleCall((), {**step.kwargs, _DECODER_MASK: mask})


def _static(step: ExampleCall, spare: int | None = None) -> ExampleCall | None:
    """Return ``step`` with a static cache that has room for its tokens and ``spare`` more, by default up to the next
    usual capacity; None where its cache is not a ``DynamicCache`` of one length, or an ``EncoderDecoderCache`` of two,
    or it has arguments outside ``OF_STEP``. Without keys and values, it needs no mask."""
    named = [(name, value) for name, value in step.kwargs.items() if is_cache(value)]
    if step.args or not OF_STEP.issuperset(step.kwargs) or len(named) != 1 or not is_resident(named[0][1]):
        return None
    ((name, past),) = named
    changed = dict(step.kwargs)
    growing = cache_of_tokens(past)
    held = [tensor for layer in growing.layers for _, tensor in tensors_of(layer)]
    if not held:
        return None
    lengths = {layer.get_seq_length() for layer in growing.layers if hasattr(layer, "keys")}
    length = max(lengths, default=0)
    of_tokens = _MASK if growing is past else _DECODER_MASK
    mask = changed.get(of_tokens)
    if lengths and (mask is None or lengths != {mask.shape[1] - 1}):
        return None
    spare = capacity_for(length + 1) - length - 1 if spare is None else spare
    cache = as_static(growing, torch.tensor(length, device=held[0].device), spare + 1)
    if growing is not past:
        cache = with_cache_of_tokens(past, cache)
    changed[name] = cache
    if mask is not None:
        changed[of_tokens] = nn.functional.pad(mask, (0, spare), value=1)
    return ExampleCall((), changed)


def _captured(model: nn.Module, generation: GenerationCall, put_back: Callable[[], None], budget: Budget) -> Capture:
    with budget.paused():
        free = choices(model, generation.call, generation.vary())
        put_back()
    return capture(model, "", generation.call, free, generation.example, budget)


def prompt_of(model: nn.Module, call: ExampleCall, new_tokens: int = 0) -> Tensor | None:
    """Return the main input in ``call``, batch first, from which ``model.generate`` can begin; None without such a
    method or input.

    It is cut where its positions, including ``new_tokens`` more, would exceed a position table."""
    if not callable(getattr(model, "generate", None)):
        return None
    prompt = _arguments(model, call).get(getattr(model, "main_input_name", "input_ids"))
    if not isinstance(prompt, Tensor) or prompt.dim() < 2:
        return None
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if holds_tokens(prompt) and isinstance(most, int) and most > new_tokens:
        return prompt[:, : most - new_tokens]
    return prompt


def _arguments(model: nn.Module, call: ExampleCall) -> dict[str, Any]:
    try:
        return inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    except TypeError:
        return {}


def _observed(model: nn.Module, prompt: Tensor, masked: bool, prompts_only: bool) -> list[GenerationCall]:
    """The calls for the prompt, and for a step unless ``prompts_only``."""
    of_tokens = holds_tokens(prompt)
    small = repeated_to(prompt, 0, BATCH)
    small = repeated_to(small, 1, LENGTH) if of_tokens else small
    count = 1 if prompts_only else CALLS
    calls, examples = (_calls(model, each, masked, count) for each in (small, prompt))

    def larger(calls: list[ExampleCall], prompt: Tensor, place: int) -> dict[str, ExampleCall]:
        dimensions = {"batch": 0, "sequence": 1} if of_tokens else {"batch": 0}
        wider = {name: repeated_to(prompt, each, prompt.shape[each] + 1) for name, each in dimensions.items()}
        varied = {name: _calls(model, each, masked, place + 1)[place] for name, each in wider.items()}
        return varied | ({"step": calls[place + 1]} if place == STEP else {})

    found = [
        GenerationCall(
            calls[place],
            examples[place],
            partial(larger, calls, small, place),
            partial(larger, examples, prompt, place),
        )
        for place in (PROMPT, STEP)[:count]
    ]
    # Without caches, each call has all tokens.
    return found if all(caches_in(each.call.kwargs.values()) for each in found) else found[:1]


def _has_padding(model: nn.Module, prompt: Tensor) -> bool:
    token = getattr(getattr(model, "generation_config", None), "pad_token_id", None)
    return isinstance(token, int) and bool((prompt == token).any())


def _calls(model: nn.Module, prompt: Tensor, masked: bool, count: int) -> list[ExampleCall]:
    """The first ``count`` calls of ``model`` for ``prompt``."""
    calls: list[ExampleCall] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ExampleCall(args, kwargs).copied())
        if len(calls) == count:
            raise _Enough

    inputs: dict[str, Any] = {getattr(model, "main_input_name", "input_ids"): prompt}
    # transformers does not pass on a mask of ones. Without one, it takes padding tokens in the prompt for padding.
    if masked or (holds_tokens(prompt) and _has_padding(model, prompt)):
        mask = torch.ones(prompt.shape[0], prompt.shape[-1], dtype=torch.long, device=prompt.device)
        mask[0, 0] = 0 if masked else 1
        inputs[_MASK] = mask
    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    generate: Any = model.generate
    try:
        with suppress(_Enough), quiet_thread(), bounded_lookups([prompt]):
            generate(**inputs, max_new_tokens=CALLS, min_new_tokens=CALLS, do_sample=False, num_beams=1)
    finally:
        handle.remove()
    return calls
