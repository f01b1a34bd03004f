"""Measurements of whole models."""

from typing import Any

from torch import nn

from ..accuracy import evaluation
from .benchmarks import benchmark_kernel
from .measurement import Measurement


def profile_model_inference(model: nn.Module, inputs: Any, warmup: int = 3, repeat: int = 30) -> Measurement:
    """Measures the forward of a model in eval mode without gradients, like `benchmark_kernel`.

    inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or the pair (args,
    kwargs), on the model's device. Every call gets the same objects, so a cache among them grows.

    The bytes moved count inputs, parameters, buffers and outputs once each. The model moves more, because it also
    writes and reads intermediate results, unless it reads few rows of large embeddings. Training flags and random
    state are restored.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    with evaluation(model):
        return benchmark_kernel(model, inputs, warmup, repeat)
