"""Captures the example call of a model, and the other usual call forms of a token model, each as a graph."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..inputs import ExampleCall, taken_apart
from ..region import CaptureError
from .captured import Capture, attempted, capture
from .deadline import Budget
from .submodule_calls import opaque_kind
from .tracer import CACHE_IN_OUTPUT, free_dimensions


def capture_form(model: nn.Module, call: ExampleCall, seconds: float = math.inf) -> Capture | CaptureError:
    """Capture ``model`` as called in ``call`` in ``seconds`` of processor time, or return the reason why not."""

    def captured() -> Capture:
        choices = [free_dimensions(model, call, free) for free in (("batch", "sequence"), ("batch",), ())]
        return capture(model, "", call, choices, budget=Budget(seconds))

    return attempted(captured)


def refused_in_every_form(model: nn.Module, counting: dict[nn.Module, str], outputs: Any) -> CaptureError | None:
    """Return the reason why no form of ``model`` can be captured, as far as it is known before a trace.

    Args:
        counting: modules that no graph may replace, each with the reason.
        outputs: the outputs of the model for its example call.
    """
    if model in counting:
        return CaptureError(counting[model])
    if not torch.is_inference_mode_enabled() and any(_is_inference(each) for each in pytree.tree_leaves(outputs)):
        return CaptureError("its forward enables inference mode, and its outputs are inference tensors")
    kind = opaque_kind(taken_apart(outputs)[0])
    if kind is not None and "Cache" in kind:
        return CaptureError(CACHE_IN_OUTPUT)
    return None


def _is_inference(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()
