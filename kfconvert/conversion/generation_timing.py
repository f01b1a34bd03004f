"""Timing of ``generate`` before and after a conversion, for the prompt of the example."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..capture import prompt_of
from ..inputs import bounded_lookups
from ..process import level_outside, quiet_thread
from ..profiling import Comparison, compare_timings
from ..runtime import CALLS_BEFORE
from .checks import first_line
from .preparation import Prepared

# The default number of generated tokens; fewer if they take longer than these seconds.
MOST_TOKENS, LEAST_TOKENS = 32, 4
LEAST_ROUNDS = 3


@dataclass(frozen=True)
class GenerationTimings:
    """``timings`` of ``generate`` by name: "original" and "converted" for ``new_tokens`` tokens, and with " prefill"
    for the first token alone; ``prompt`` is the shape of the prompt, batch first."""

    prompt: tuple[int, ...]
    new_tokens: int
    timings: Comparison

    def as_dict(self) -> dict[str, Any]:
        """Returns {"prompt", "new_tokens", "speedup" (see ``profiling.Speedup``), "original", "converted"}. Each of the
        last two is {"tokens_per_s", "prefill_ms", "step_ms"}. ``tokens_per_s`` counts all rows of the batch, and
        ``step_ms`` is the time of each token after the first (None if there is none)."""
        sides = {name: self._side(name) for name in ("original", "converted")}
        speedup = self.timings.speedup("converted").as_dict()
        return {"prompt": list(self.prompt), "new_tokens": self.new_tokens, "speedup": speedup, **sides}

    def _side(self, name: str) -> dict[str, float | None]:
        whole, first = self.timings[name].median_ms, self.timings[f"{name} prefill"].median_ms
        step = (whole - first) / (self.new_tokens - 1) if self.new_tokens > 1 else None
        rate = 1e3 * self.prompt[0] * self.new_tokens / whole
        return {"tokens_per_s": rate, "prefill_ms": first, "step_ms": step}


def time_generation(
    prepared: Prepared, wanted: int | None, budget_s: float, forward_ms: float
) -> GenerationTimings | None:
    """Times greedy generation of both models from the example's prompt; None without generation, or without timing.

    Args:
        wanted: number of new tokens; None for as many as ``budget_s`` seconds allow, within bounds.
        forward_ms: the time of the original's example call, the estimate for each of its tokens.
    """
    prompt = prompt_of(prepared.model, prepared.call, wanted or MOST_TOKENS)
    if prompt is None or wanted == 0:
        return None
    affordable = int(1e3 * budget_s / (2 * LEAST_ROUNDS * forward_ms)) - 2  # each round has two prefills, too
    tokens = wanted or min(max(affordable, LEAST_TOKENS), MOST_TOKENS)
    calls: dict[str, Callable[[], Any]] = {}
    for name, run in (("original", _original), ("converted", _generated)):
        calls[name] = partial(run, prepared, prompt, tokens)
        calls[f"{name} prefill"] = partial(run, prepared, prompt, 1)
    try:
        with quiet_thread():
            with bounded_lookups([prompt]):
                calls["original"]()
            for _ in range(CALLS_BEFORE + 1):
                calls["converted"]()
            timings = compare_timings(calls, prepared.device, budget_s, LEAST_ROUNDS, settled=True)
    except Exception as error:  # the model's code or configuration may cause any error
        if wanted:
            reason = f"kfconvert: generate() of {tokens} tokens was not timed: {first_line(error)}"
            warnings.warn(reason, stacklevel=level_outside())
        return None
    return GenerationTimings(tuple(prompt.shape[:2]), tokens, timings)


def _original(prepared: Prepared, prompt: torch.Tensor, tokens: int) -> Any:
    return prepared.run_original(partial(_generate, prompt=prompt, tokens=tokens))


def _generated(prepared: Prepared, prompt: torch.Tensor, tokens: int) -> Any:
    return _generate(prepared.model, prompt, tokens)


def _generate(model: Any, prompt: torch.Tensor, tokens: int) -> Any:
    given = {getattr(model, "main_input_name", "input_ids"): prompt}
    return model.generate(**given, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, num_beams=1)
