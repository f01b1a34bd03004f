"""The counters of converted models in the text format of Prometheus."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_OWN_LABELS = frozenset(("model", "module", "reason", "kind"))

_Labels = dict[str, str]


class _Metric(NamedTuple):
    name: str
    type: str
    help: str


_HITS = _Metric("kfconvert_hits_total", "counter", "Calls that a fused program served.")
_MISSES = _Metric("kfconvert_misses_total", "counter", "Calls that ran the original forward, by the reason.")
_REPLAYED = _Metric("kfconvert_replayed_calls_total", "counter", "Calls that replayed a CUDA graph.")
_LAUNCHED = _Metric("kfconvert_launched_calls_total", "counter", "Calls without a replay, in models with graphs.")
_RECORDINGS = _Metric("kfconvert_recordings", "gauge", "Recorded CUDA graphs.")
_MEMORY = _Metric(
    "kfconvert_memory_bytes",
    "gauge",
    "Memory of weights, tensors derived from them for the example, CUDA graphs, and weights in host memory.",
)
_METRICS = (_HITS, _MISSES, _REPLAYED, _LAUNCHED, _RECORDINGS, _MEMORY)


def prometheus_text(models: nn.Module | Mapping[str, nn.Module], labels: Mapping[str, str] | None = None) -> str:
    """Returns the counters of ``kfconvert_info()`` in the exposition format of Prometheus (version 0.0.4).

    Every sample has the label ``model``. Hits and misses have ``module``, the path of the converted part ("" is the
    model itself). Misses have ``reason``, and memory has ``kind``. Counters start at 0 when a model is converted or
    loaded.

    Args:
        models: a converted or loaded model, labelled with its class name, or a dict of models by label.
        labels: additional labels for every sample.

    Raises:
        ValueError: a model was not converted, or the name of a label is not allowed or listed above.
    """
    given = dict(labels or {})
    for name in given:
        if not _LABEL.fullmatch(name) or name in _OWN_LABELS:
            raise ValueError(f"{name!r} cannot be the name of a label")
    named = {type(models).__name__: models} if isinstance(models, nn.Module) else models
    samples: dict[_Metric, list[str]] = {metric: [] for metric in _METRICS}
    for name, model in named.items():
        if not hasattr(model, "kfconvert_info"):
            raise ValueError(f"this {type(model).__name__} is not a converted model")
        info: Any = model.kfconvert_info
        for metric, own, value in _samples(info()):
            samples[metric].append(f"{metric.name}{_told({'model': name, **own, **given})} {value}")
    lines = []
    for metric in _METRICS:
        if samples[metric]:
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.type}", *samples[metric]]
    return "".join(f"{line}\n" for line in lines)


def _samples(info: dict[str, Any]) -> Iterator[tuple[_Metric, _Labels, int]]:
    """Each metric of one model with the labels of a sample and its value."""
    for path, counts in {"": info["guard"], **info["parts"]}.items():
        yield _HITS, {"module": path}, counts["hits"]
        for reason, count in list(counts["misses"].items()):
            yield _MISSES, {"module": path, "reason": reason}, count
    graphs = info.get("cuda_graphs") or {}
    yield _REPLAYED, {}, graphs.get("replayed", 0)
    yield _LAUNCHED, {}, graphs.get("launched", 0)
    yield _RECORDINGS, {}, graphs.get("recordings", 0)
    memory = info.get("memory") or {}
    for kind in ("weights", "derived"):
        if memory.get(kind) is not None:
            yield _MEMORY, {"kind": kind}, memory[kind]
    yield _MEMORY, {"kind": "recordings"}, graphs.get("bytes", 0)
    if info.get("frozen"):
        yield _MEMORY, {"kind": "host"}, info["frozen"]["host_bytes"]


def _told(labels: _Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
