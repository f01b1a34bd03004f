"""The calls that ``generate`` makes of a model: for the prompt, and for the next token, each with a cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..inputs import ExampleCall, bounded_lookups, caches_in, holds_tokens
from ..process import quiet_thread
from ..region import CaptureError
from .captured import Capture, capture, unforeseen
from .parts import choices

# A prompt to trace with, in examples and tokens: of sizes that differ, and that are small, so that it takes no time.
BATCH, LENGTH = 2, 5
# The call for the prompt, then three steps; what is free in a step shows where the second differs from the third, and
# the lengths of the second are at least 2.
CALLS = 4
PROMPT, STEP = 0, 2


class _Enough(Exception):
    """Ends a run of ``generate``."""


@dataclass
class GenerationCall:
    """A call of the model as ``generate`` makes it with a small prompt; ``varied``, the same with one size changed; and
    ``example``, the same with the prompt of the user's example."""

    call: ExampleCall
    example: ExampleCall
    varied: dict[str, ExampleCall] = field(default_factory=dict)


def capture_generation(
    model: nn.Module, call: ExampleCall, first: Capture | CaptureError, put_back: Callable[[], None]
) -> list[tuple[ExampleCall, Capture | CaptureError]]:
    """``model`` in each form in which its ``generate`` calls it, or why that form cannot be captured.

    Args:
        call: the example call, from which ``generate`` gets its prompt.
        first: what was captured for it. Where that returns no cache, nothing is done.
        put_back: gives the model the state that it had before a call.
    """
    if not isinstance(first, Capture) or not first.region.has_caches:
        return []
    found = []
    for generation in _generation_calls(model, call, put_back):
        found.append((generation.call, _captured(model, generation)))
        put_back()
    return found


def _generation_calls(model: nn.Module, call: ExampleCall, put_back: Callable[[], None]) -> list[GenerationCall]:
    """The calls that ``model.generate`` makes for the prompt of ``call``, without and with a mask; none where there is
    no such method, or it passes no cache, or raises."""
    prompt = prompt_of(model, call, CALLS)
    if prompt is None:
        return []
    found: dict[Any, GenerationCall] = {}
    for masked in (False, True):
        try:
            for place, generation in enumerate(_observed(model, prompt, masked)):
                # It may hand no mask on, and then calls the model as it does without one.
                found.setdefault((place, *generation.call.kwargs), generation)
        except Exception:  # its configuration may ask for anything
            continue
        finally:
            put_back()
    return list(found.values())


def _captured(model: nn.Module, generation: GenerationCall) -> Capture | CaptureError:
    try:
        call = generation.call
        return capture(model, "", call, choices(model, call, generation.varied), generation.example)
    except CaptureError as error:
        return error
    except Exception as error:
        return unforeseen(error)


def prompt_of(model: nn.Module, call: ExampleCall, new_tokens: int = 0) -> Tensor | None:
    """The main input among the arguments of ``call``, batch first, from which ``model.generate`` can begin; None where
    there is no such method or input.

    It is cut where its positions and those of ``new_tokens`` more would be beyond the end of a table."""
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
    small = _sized(prompt, 0, BATCH)
    small = _sized(small, 1, LENGTH) if of_tokens else small
    calls = _calls(model, small, masked)
    examples = _calls(model, prompt, masked)
    larger = {"batch": _calls(model, _sized(small, 0, BATCH + 1), masked)}
    if of_tokens:
        larger["sequence"] = _calls(model, _sized(small, 1, LENGTH + 1), masked)
    found = [
        GenerationCall(calls[place], examples[place], {name: varied[place] for name, varied in larger.items()})
        for place in (PROMPT, STEP)
    ]
    found[1].varied["step"] = calls[STEP + 1]
    return found if all(caches_in(each.call.kwargs.values()) for each in found) else []


def _sized(prompt: Tensor, dimension: int, size: int) -> Tensor:
    """``prompt`` cut to ``size`` entries, or repeated to have as many."""
    copies = -(-size // prompt.shape[dimension])
    return torch.cat([prompt] * copies, dimension).narrow(dimension, 0, size)


def _calls(model: nn.Module, prompt: Tensor, masked: bool) -> list[ExampleCall]:
    """The first calls of ``model`` for ``prompt``."""
    calls: list[ExampleCall] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(ExampleCall(args, kwargs).copied())
        if len(calls) == CALLS:
            raise _Enough

    inputs: dict[str, Any] = {getattr(model, "main_input_name", "input_ids"): prompt}
    if masked:
        # A mask of ones is not handed on.
        mask = torch.ones(prompt.shape[0], prompt.shape[-1], dtype=torch.long, device=prompt.device)
        mask[0, 0] = 0
        inputs["attention_mask"] = mask
    handle = model.register_forward_pre_hook(keep, with_kwargs=True)
    generate: Any = model.generate
    try:
        with quiet_thread(), bounded_lookups([prompt]):
            generate(**inputs, max_new_tokens=CALLS, min_new_tokens=CALLS, do_sample=False, num_beams=1)
    except _Enough:
        pass
    finally:
        handle.remove()
    return calls
