"""Measurements of whole models."""

from typing import Any

from torch import nn

from ..accuracy import evaluation
from .benchmarks import benchmark_kernel
from .measurement import Measurement


def profile_model_inference(model: nn.Module, inputs: Any, warmup: int = 3, repeat: int = 30) -> Measurement:
    """Measure the forward of a model in evaluation mode without gradients, as `benchmark_kernel` does.

    inputs: a tensor, a tuple of positional arguments, a mapping of keyword arguments, or the pair (args,
    kwargs); on the model's device. Every call gets these very objects, so a cache among them grows.

    The bytes moved are those of inputs, parameters, buffers and outputs, each once: less than the model
    moves, which also writes and reads what lies between its layers, unless it reads few rows of large
    embeddings. Training flags and random state are afterwards as before.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    with evaluation(model):
        return benchmark_kernel(model, inputs, warmup, repeat)
