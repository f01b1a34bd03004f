"""The counters of converted models in the text format of Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = frozenset(("model", "module", "reason", "kind"))

_METRICS = {
    "kfconvert_hits_total": "Calls that a fused program served.",
    "kfconvert_misses_total": "Calls that ran the original forward, by the reason.",
    "kfconvert_replayed_calls_total": "Calls that replayed a CUDA graph.",
    "kfconvert_launched_calls_total": "Calls without a replay, in models with graphs.",
    "kfconvert_recordings": "Recorded CUDA graphs.",
    "kfconvert_memory_bytes": "Memory of weights, of tensors derived from them, and of CUDA graphs.",
}


def prometheus_text(models: nn.Module | Mapping[str, nn.Module], labels: Mapping[str, str] | None = None) -> str:
    """Returns the counters of ``kfconvert_info()`` in the exposition format of Prometheus (version 0.0.4).

    Every sample has the label ``model``. Hits and misses have ``module``, the path of the converted part ("" is the
    model itself). Misses have ``reason``, and memory has ``kind``. Counters start at 0 when a model is converted or
    loaded.

    Args:
        models: a converted or loaded model, labeled with its class name, or a dict of models by label.
        labels: additional labels for every sample.

    Raises:
        ValueError: a model was not converted, or the name of a label is not allowed or listed above.
    """
    given = dict(labels or {})
    for name in given:
        if not _LABEL.fullmatch(name) or name in _OWN_LABELS:
            raise ValueError(f"{name!r} cannot be the name of a label")
    named = {type(models).__name__: models} if isinstance(models, nn.Module) else models
    samples: dict[str, list[str]] = {metric: [] for metric in _METRICS}
    for name, model in named.items():
        if not hasattr(model, "kfconvert_info"):
            raise ValueError(f"this {type(model).__name__} is not a converted model")
        info: Any = model.kfconvert_info
        for metric, own, value in _samples(info()):
            labelled = {"model": name, **own, **given}.items()
            pairs = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in labelled)
            samples[metric].append(f"{metric}{{{pairs}}} {value}\n")
    return "".join(
        f"# HELP {metric} {help}\n# TYPE {metric} {'counter' if metric.endswith('_total') else 'gauge'}\n"
        + "".join(samples[metric])
        for metric, help in _METRICS.items()
        if samples[metric]
    )


def _samples(info: dict[str, Any]) -> Iterator[tuple[str, dict[str, str], int]]:
    """Each metric of one model with the labels of a sample and its value."""
    for path, counts in {"": info["guard"], **info["parts"]}.items():
        yield "kfconvert_hits_total", {"module": path}, counts["hits"]
        for reason, count in list(counts["misses"].items()):
            yield "kfconvert_misses_total", {"module": path, "reason": reason}, count
    graphs, memory = info.get("cuda_graphs") or {}, info.get("memory") or {}
    for what in ("replayed", "launched"):
        yield f"kfconvert_{what}_calls_total", {}, graphs.get(what, 0)
    yield "kfconvert_recordings", {}, graphs.get("recordings", 0)
    kinds = {kind: memory.get(kind) for kind in ("weights", "derived")} | {"recordings": graphs.get("bytes", 0)}
    for kind, size in kinds.items():
        if size is not None:
            yield "kfconvert_memory_bytes", {"kind": kind}, size


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
