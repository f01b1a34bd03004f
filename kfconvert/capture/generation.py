"""The calls of a model by ``generate``: for the prompt, and for the next token, each with a cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..accuracy import is_close
from ..inputs import ExampleCall, bounded_lookups, caches_in, capacity_for, holds_tokens, repeated_to, static_key_values
from ..process import quiet_thread
from ..region import CaptureError
from .captured import Capture, attempted, capture
from .parts import choices
from .trial_runs import TOLERANCES

# The prompt size of traces, in examples and tokens: two different sizes, small for speed.
BATCH, LENGTH = 2, 5
# The prompt call, then three steps. The second and third steps differ in the free sizes, and the lengths of the second
# are at least 2.
CALLS = 4
PROMPT, STEP = 0, 2
# The arguments that a step may have besides the cache. Only transformers' loop can run other steps.
OF_STEP = frozenset(
    ("input_ids", "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "return_dict")
)
# The additional room of the static cache in traces.
SPARE = 8


class _Enough(Exception):
    """Ends a run of ``generate``."""


@dataclass
class GenerationCall:
    """A call of the model by ``generate`` with a small prompt; ``varied``, the same with one other size; and
    ``example``, the same with the prompt of the user's example."""

    call: ExampleCall
    example: ExampleCall
    varied: dict[str, ExampleCall] = field(default_factory=dict)


def capture_generation(
    model: nn.Module,
    call: ExampleCall,
    first: Capture | CaptureError,
    put_back: Callable[[], None],
    static: bool = False,
    fewest: bool = False,
) -> list[tuple[ExampleCall, Capture | CaptureError]]:
    """Return ``model`` in each form in which its ``generate`` calls it, or the reason why that form cannot be captured.

    Args:
        call: the example call, which provides the prompt for ``generate``.
        first: the capture of that call. If it returns no cache, the result is empty.
        put_back: restores the state of the model from before a call.
        static: whether to capture the step on a static cache as well (see ``kfconvert.generation``).
        fewest: capture only the forms for greedy decoding without padding: the prompt, and the step on a static cache
            if requested and available, or else on a growing cache; for encoder-decoders with and without a mask.
    """
    if not isinstance(first, Capture) or not first.region.has_caches:
        return []
    found = []
    for generation in _generation_calls(model, call, put_back, static, fewest):
        found.append((generation.call, attempted(partial(_captured, model, generation))))
        put_back()
    return found


def _generation_calls(
    model: nn.Module, call: ExampleCall, put_back: Callable[[], None], static: bool, fewest: bool
) -> list[GenerationCall]:
    """The calls of ``model.generate`` for the prompt of ``call``, without and with a mask, and its step on a static
    cache if requested; none where the method is missing, passes no cache, or raises."""
    prompt = prompt_of(model, call, CALLS)
    if prompt is None:
        return []
    observed: list[list[GenerationCall]] = []
    on_static = None
    # Encoder-decoders pass on every given mask, even without padding.
    both = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    for masked in (False, True) if static or both or not fewest else (False,):
        try:
            calls = _observed(model, prompt, masked)
            # transformers may drop a mask of ones, and with it the mask of unused cache entries.
            on_static = _on_static_cache(model, calls[-1]) if static and masked and calls else None
        except Exception:  # its configuration may have any effect
            continue
        finally:
            put_back()
        observed.append(calls)
    if fewest:
        observed = [calls[:1] if on_static else calls for calls in (observed if both else observed[:1])]
    found: dict[Any, GenerationCall] = {}
    for calls in observed:
        for place, each in enumerate(calls):
            # The model may not pass the mask on, and then makes the same call as without one.
            given = (name for name, value in each.call.kwargs.items() if value is not None)
            found.setdefault((place, *given), each)
    return [*found.values(), *([on_static] if on_static else [])]


def _on_static_cache(model: nn.Module, step: GenerationCall) -> GenerationCall | None:
    """Return ``step`` with a static cache as its cache; None where the model then computes different outputs."""
    call, mask = _static(step.call, SPARE), step.example.kwargs.get("attention_mask")
    example = None if mask is None else _static(step.example, capacity_for(mask.shape[1]) - mask.shape[1])
    if call is None or example is None or "sequence" not in step.varied:
        return None
    with torch.no_grad():
        logits, others = (each(model).logits for each in (step.call, call))
    if not is_close(logits, others, TOLERANCES):
        return None
    varied = {name: _static(each, SPARE) for name, each in step.varied.items() if name != "step"}
    return GenerationCall(call, example, {name: each for name, each in varied.items() if each is not None})


def _static(step: ExampleCall, spare: int) -> ExampleCall | None:
    """Return ``step`` with a static cache that has room for its tokens and ``spare`` more; None where its cache is not
    a ``DynamicCache`` of one length, or it has arguments outside ``OF_STEP``."""
    mask, past = step.kwargs.get("attention_mask"), step.kwargs.get("past_key_values")
    if step.args or not OF_STEP.issuperset(step.kwargs) or mask is None or type(past).__name__ != "DynamicCache":
        return None
    held = [tensor for layer in past.layers for tensor in (layer.keys, layer.values)]
    lengths = {tensor.shape[-2] for tensor in held}
    if lengths != {mask.shape[1] - 1}:
        return None
    (length,) = lengths
    padded = [nn.functional.pad(tensor, (0, 0, 0, spare + 1)) for tensor in held]
    cache = static_key_values()([torch.tensor(length, device=mask.device), *padded])
    changed = {"attention_mask": nn.functional.pad(mask, (0, spare), value=1), "past_key_values": cache}
    return ExampleCall((), {**step.kwargs, **changed})


def _captured(model: nn.Module, generation: GenerationCall) -> Capture:
    free = choices(model, generation.call, generation.varied)
    return capture(model, "", generation.call, free, generation.example)


def prompt_of(model: nn.Module, call: ExampleCall, new_tokens: int = 0) -> Tensor | None:
    """Return the main input in ``call``, batch first, from which ``model.generate`` can begin; None without such a
    method or input.

    It is cut where its positions, including ``new_tokens`` more, would exceed a position table."""
    if not callable(getattr(model, "generate", None)):
        return None
    try:
        arguments = inspect.signature(model.forward).bind(*call.args, **call.kwargs).arguments
    except TypeError:
        return None
    prompt = arguments.get(getattr(model, "main_input_name", "input_ids"))
    if not isinstance(prompt, Tensor) or prompt.dim() < 2:
        return None
    most = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if holds_tokens(prompt) and isinstance(most, int) and most > new_tokens:
        return prompt[:, : most - new_tokens]
    return prompt


def _observed(model: nn.Module, prompt: Tensor, masked: bool) -> list[GenerationCall]:
    of_tokens = holds_tokens(prompt)
    small = repeated_to(prompt, 0, BATCH)
    small = repeated_to(small, 1, LENGTH) if of_tokens else small
    calls = _calls(model, small, masked)
    examples = _calls(model, prompt, masked)
    larger = {"batch": _calls(model, repeated_to(small, 0, BATCH + 1), masked)}
    if of_tokens:
        larger["sequence"] = _calls(model, repeated_to(small, 1, LENGTH + 1), masked)
    found = [
        GenerationCall(calls[place], examples[place], {name: varied[place] for name, varied in larger.items()})
        for place in (PROMPT, STEP)
    ]
    found[1].varied["step"] = calls[STEP + 1]
    return found if all(caches_in(each.call.kwargs.values()) for each in found) else []


def _calls(model: nn.Module, prompt: Tensor, masked: bool) -> list[ExampleCall]:
    """The first calls of ``model`` for ``prompt``."""
    calls: list[ExampleCall] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ExampleCall(args, kwargs).copied())
        if len(calls) == CALLS:
            raise _Enough

    inputs: dict[str, Any] = {getattr(model, "main_input_name", "input_ids"): prompt}
    if masked:
        # transformers does not pass on a mask of ones.
        mask = torch.ones(prompt.shape[0], prompt.shape[-1], dtype=torch.long, device=prompt.device)
        mask[0, 0] = 0
        inputs["attention_mask"] = mask
    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    generate: Any = model.generate
    try:
        with suppress(_Enough), quiet_thread(), bounded_lookups([prompt]):
            generate(**inputs, max_new_tokens=CALLS, min_new_tokens=CALLS, do_sample=False, num_beams=1)
    finally:
        handle.remove()
    return calls
