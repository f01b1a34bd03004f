"""What the examples share: their options, models by name, and a conversion that is told in three lines."""

import argparse
import warnings
from typing import Any

import torch
from torch import nn

import kfconvert
from kfconvert import zoo


def options_of(description: str | None) -> argparse.ArgumentParser:
    """A parser of the options that every example has: ``small``, ``device``."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--small", action="store_true", help="a form of some seconds for one core of a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def converted(name: str, model: nn.Module, example_inputs: Any, small: bool = False, **more: Any) -> nn.Module:
    """``model``, converted for calls like ``example_inputs``, with ``more`` options; what became of it is printed.

    The small form takes all that is accurate and does not time which of it is faster.
    """
    options: dict[str, Any] = ({"effort": "fast", "select": "all"} if small else {}) | more
    converter = kfconvert.ModelConverter(**options)
    fused = converter.convert_model(model, example_inputs=example_inputs)
    stats = converter.conversion_stats
    applied = sorted({site["pattern"] for site in stats["sites"] if site["status"] == "applied"})
    accuracy, speedup = stats["accuracy"], stats["speedup_achieved"]
    print(f"{name}: {stats['total_replaced']} of {stats['total_found']} sites fused: {', '.join(applied) or 'none'}")
    print(f"  accurate: {accuracy['passed']}, error against float64 {_errors(accuracy)}")
    given_back = f"given back as it was: {stats['given_back']}, " if stats["given_back"] else ""
    print(f"  {given_back}" + ("not timed" if speedup is None else f"{speedup:.2f} x as fast as the original"))
    return fused


def by_name(name: str) -> zoo.ZooModel:
    """The model called ``name`` and inputs for it, on the CPU; its weights are random, and that is said, where no hub
    can be reached."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", zoo.WeightsWarning)
        entry = zoo.resolve(name, "auto")
    for warning in caught:
        if issubclass(warning.category, zoo.WeightsWarning):
            print(warning.message)
    return entry


def moved(inputs: Any, device: str) -> Any:
    """Example inputs, a tensor or a dict of such, on another device."""
    if isinstance(inputs, dict):
        return {name: value.to(device) for name, value in inputs.items()}
    return inputs.to(device)


def _errors(accuracy: dict[str, Any]) -> str:
    """The largest errors of the original and the converted model, relative to the largest value."""
    errors = [accuracy[which] for which in ("original_error", "optimized_error")]
    return " -> ".join("none" if error is None else f"{error['max_rel']:.1e}" for error in errors)
