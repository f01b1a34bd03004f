"""Decides which sites are fused and how: every candidate is checked against float64 and timed on this device."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from .dataflow import aten
from .lowering import lower
from .matcher import is_weight
from .modules import FusedModule
from .profiling import compare_timings
from .program import Program
from .rewriter import LiveTensors, Site
from .tracer import Region

# Root-mean-square error that a candidate may have, as a multiple of the original's own. The user's threshold and one
# unit of rounding are always allowed: the original may be exact by luck.
ERROR_RATIO = 1.5
# A candidate that covers several operators is kept when it is not slower than this; a swap of one operator for
# another must be faster than its inverse. Medians nearer to each other than this are not told apart here.
SAME_TIME = 1.02
SECONDS_PER_CANDIDATE = 0.01
# On CUDA so many calls are launched between two synchronisations: the time of one is then what the device needs for
# it, or what the host needs to launch it where that is more, without the latency of the synchronisation.
CALLS_IN_FLIGHT = 10
SECONDS_PER_LAYOUT = 0.2
# A strategy is not timed where its first call took longer than this, and so many times as long as the fastest.
SLOW_SECONDS = 0.02
HOPELESS = 2.0


@dataclass(frozen=True)
class Decision:
    """What was found for one kind of site. ``strategy`` is None where no candidate may be applied."""

    strategy: str | None
    reason: str | None
    original_us: float | None = None
    fused_us: float | None = None
    error_ratio: float | None = None

    @classmethod
    def of(cls, site: Site) -> Decision:
        """What was decided about ``site``."""
        return cls(site.strategy, site.reason, site.original_us, site.fused_us, site.error_ratio)

    def apply_to(self, site: Site) -> None:
        site.original_us, site.fused_us, site.error_ratio = self.original_us, self.fused_us, self.error_ratio
        site.strategy = site.replacement.module.strategy = self.strategy
        if self.strategy is None:
            site.reject(self.reason)
        else:
            site.status, site.reason = "applied", None


class Selector:
    """Remembers what it decided for each kind of site (pattern, module, its tensors, shapes, dtypes, layouts).

    Args:
        accuracy_threshold: relative error that always passes.
        timed: measure candidates and reject what is not faster; otherwise the first accurate strategy is taken.
    """

    def __init__(self, device: torch.device, accuracy_threshold: float, timed: bool):
        self.device, self.accuracy_threshold, self.timed = device, accuracy_threshold, timed
        self._decisions: dict[Any, Decision] = {}
        self._keys: dict[tuple[int, bool], Any] = {}  # by the id of a site and the layout

    def select(
        self,
        region: Region,
        sites: list[Site],
        live: LiveTensors,
        leaves: list[Any],
        channels_last: bool,
    ) -> None:
        """Decide every site of ``region``, whose user inputs are ``leaves``; sets status, reason and strategy.

        ``channels_last``: convolutions receive and return channels-last images.
        """
        for site in sites:
            if hasattr(site.replacement.module, "channels_last"):
                site.replacement.module.channels_last = channels_last
        if not sites:
            return
        if not all((id(site), channels_last) in self._keys for site in sites):
            keys, samples = _sample_inputs(region, sites, live, leaves, channels_last)
            self._keys |= {(id(site), channels_last): keys[id(site)] for site in sites}
        for site in sites:
            key = self._keys[id(site), channels_last]
            if key not in self._decisions:
                self._decisions[key] = self._decide(samples[key])
            self._decisions[key].apply_to(site)

    def faster_layout(self, programs: dict[bool, Program], leaves: list[Any]) -> bool:
        """Whether the program with channels-last convolutions (True) is the faster one; both have run before."""
        candidates = {str(layout): lambda p=program: p.run(leaves) for layout, program in programs.items()}
        budget = SECONDS_PER_LAYOUT * len(candidates)
        times = compare_timings(candidates, self.device, budget_s=budget, min_rounds=3, settled=True)
        return times[str(True)].median_ms < times[str(False)].median_ms

    def slower(self, original: Callable[[], Any], converted: Callable[[], Any]) -> str | None:
        """None where ``converted`` is the faster call, else what both take."""
        medians = self._medians({"original": original, "converted": converted})
        if medians["converted"] < medians["original"]:
            return None
        return f"it takes {medians['converted']:.1f} us, the original {medians['original']:.1f} us"

    @torch.no_grad()
    def _decide(self, sample: _Sample) -> Decision:
        module, inputs = sample.site.replacement.module, sample.inputs
        original = sample.original
        exact = _flat(sample.exact())
        own, seconds = _timed_error(original, exact)
        first_calls = {"original": seconds}
        allowed = max(ERROR_RATIO * own, self.accuracy_threshold, torch.finfo(sample.dtype).eps)
        accurate, errors, least, failed = {}, {}, math.inf, ""
        for strategy in _fused_strategies(module, inputs):
            module.strategy = strategy
            try:
                plan = partial(module.plan(*inputs), *inputs)
                error, seconds = _timed_error(plan, exact)
            except RuntimeError as refusal:  # a library that does not take these shapes
                failed += f"; {strategy}: {refusal}".splitlines()[0]
                continue
            if error <= allowed:
                accurate[strategy], errors[strategy] = plan, error / max(own, torch.finfo(torch.float64).eps)
                first_calls[strategy] = seconds
            least = min(least, error)
        if math.isinf(least):
            return Decision(None, f"no fused implementation for {sample.dtype} on this device{failed}")
        if not accurate:
            return Decision(None, f"error {least:.1e} against float64, allowed {allowed:.1e}")
        if not self.timed:
            strategy = next(iter(accurate))
            return Decision(strategy, None, error_ratio=errors[strategy])
        operators = sum(node.target is not aten.t.default for node in sample.site.match.nodes)
        promising = {name: accurate[name] for name in _promising(first_calls)}
        decision = self._fastest(operators, {"original": original, **promising})
        return replace(decision, error_ratio=errors.get(decision.strategy))

    def _fastest(self, operators: int, candidates: dict[str, Callable[[], Any]]) -> Decision:
        """The fastest candidate, for a site of so many operators, unless that is the original."""
        medians = self._medians(candidates)
        before = medians.pop("original")
        best = min(medians, key=medians.__getitem__)
        limit = before * SAME_TIME if operators > 1 else before / SAME_TIME
        if medians[best] > limit:
            reason = f"not faster: {best} takes {medians[best]:.1f} us, the original {before:.1f} us"
            return Decision(None, reason, before, medians[best])
        return Decision(best, None, before, medians[best])

    def _medians(self, candidates: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """The time of one call of each candidate in microseconds."""
        repeats = CALLS_IN_FLIGHT if self.device.type == "cuda" else 1
        budget = SECONDS_PER_CANDIDATE * len(candidates)
        repeated = {name: partial(_repeat, call, repeats) for name, call in candidates.items()}
        times = compare_timings(repeated, self.device, budget_s=budget, min_rounds=3, settled=True)
        return {name: 1e3 * timing.median_ms / repeats for name, timing in times.items()}


def _timed_error(call: Callable[[], Any], exact: list[Tensor]) -> tuple[float, float]:
    """The error of one call, and the seconds that it and the comparison took."""
    start = time.perf_counter()
    error = _error(_flat(call()), exact)
    return error, time.perf_counter() - start


def _promising(first_calls: dict[str, float]) -> list[str]:
    """The fused strategies to time, by the seconds that the first call of each, and of the original, took."""
    names = [name for name in first_calls if name != "original"]
    limit = max(HOPELESS * min(first_calls.values()), SLOW_SECONDS)
    return [name for name in names if first_calls[name] <= limit] or [min(names, key=first_calls.__getitem__)]


def _fused_strategies(module: FusedModule, inputs: tuple[Tensor, ...]) -> list[str]:
    """The last strategy of every module is plain ATen, which is what the original does."""
    return module.strategies(*inputs)[:-1]


def _repeat(call: Callable[[], Any], times: int) -> None:
    for _ in range(times):
        call()


@dataclass(frozen=True)
class _Sample:
    """Real inputs of one site, and the original subgraph to run on them."""

    site: Site
    inputs: tuple[Tensor, ...]
    subgraph: Callable[..., Any]
    exact_subgraph: Callable[..., Any]
    arguments: tuple[Any, ...]  # tensors, and sizes as integers

    @property
    def dtype(self) -> torch.dtype:
        return self.inputs[0].dtype

    def original(self) -> Any:
        return self.subgraph(*self.arguments)

    def exact(self) -> Any:
        """The original in float64 throughout, where the model itself casts as well."""
        return self.exact_subgraph(*map(_in_float64, self.arguments))


class _Recorder(fx.Interpreter):
    """Runs a region's graph and keeps the inputs of one site of each kind."""

    def __init__(self, region: Region, sites: list[Site], channels_last: bool):
        super().__init__(region.root, graph=region.graph)
        self.channels_last = channels_last
        self.keys: dict[int, Any] = {}
        self.samples: dict[Any, _Sample] = {}
        # A value is held from when it is computed until the last site that reads it has been recorded.
        self._held: dict[fx.Node, Any] = {}
        self._readers: Counter[fx.Node] = Counter()
        self._sites_at: dict[fx.Node, list[tuple[Site, list[fx.Node]]]] = {}
        order = {node: index for index, node in enumerate(region.graph.nodes)}
        for site in sites:
            outer = _outer_values(site)
            self._readers.update(outer)
            self._sites_at.setdefault(max(outer, key=order.__getitem__), []).append((site, outer))

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node in self._readers:
            self._held[node] = result
        for site, outer in self._sites_at.get(node, ()):
            self._record(site, outer)
            self._readers.subtract(outer)
            for value in outer:
                if not self._readers[value]:
                    self._held.pop(value, None)
        return result

    def _record(self, site: Site, outer: list[fx.Node]) -> None:
        inputs = tuple(self._held[node] for node in site.replacement.inputs)
        if self.channels_last:
            inputs = tuple(_in_channels_last(x) for x in inputs)
        layouts = tuple((tuple(x.shape), x.stride(), x.dtype) for x in inputs)
        tensors = tuple(name for _, name, _ in site.replacement.bindings)
        key = (site.match.pattern.name, site.kind, tensors, len(site.replacement.outputs), layouts)
        self.keys[id(site)] = key
        if key in self.samples:
            return
        arguments = tuple(self._held[node] for node in outer)
        subgraph, exact = _subgraph(site, outer), _subgraph(site, outer, _in_float64)
        self.samples[key] = _Sample(site, inputs, subgraph, exact, arguments)


def _sample_inputs(
    region: Region, sites: list[Site], live: LiveTensors, leaves: list[Any], channels_last: bool
) -> tuple[dict[int, Any], dict[Any, _Sample]]:
    recorder = _Recorder(region, sites, channels_last)
    users = iter(leaves)
    inputs = [
        live.tensor(node) if is_weight(node) else next(users)
        for node in region.graph.nodes
        if node.op == "placeholder"
    ]
    with torch.no_grad():
        recorder.run(*inputs)
    return recorder.keys, recorder.samples


def _in_channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def _covered(site: Site) -> list[fx.Node]:
    """The matched calls in graph order."""
    return [node for node in site.match.root.graph.nodes if node in site.match.nodes]


def _outer_values(site: Site) -> list[fx.Node]:
    """The values that the matched calls read: inputs and weights."""
    covered = _covered(site)
    return list(dict.fromkeys(value for node in covered for value in node.all_input_nodes if value not in covered))


def _unchanged(argument: Any) -> Any:
    return argument


def _in_float64(value: Any) -> Any:
    """float64 in place of a floating-point dtype, for a tensor and for a dtype that a call names."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _subgraph(
    site: Site, outer: list[fx.Node], change: Callable[[Any], Any] = _unchanged
) -> Callable[..., Any]:
    """The matched calls as a function of ``outer``, the values that they read; ``change`` maps their constants."""
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"value_{index}") for index, node in enumerate(outer)}
    for node in _covered(site):
        copied = copies[node] = graph.node_copy(node, copies.__getitem__)
        copied.args, copied.kwargs = (map_aggregate(given, change) for given in (copied.args, copied.kwargs))
    graph.output(tuple(copies[node] for node in site.replacement.outputs))
    lower(graph)
    return fx.GraphModule(torch.nn.Module(), graph).forward


def _flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def _error(outputs: list[Tensor], exact: list[Tensor]) -> float:
    """Root-mean-square error relative to the root mean square of the exact values, the worst of the outputs.

    Infinite where an output is NaN or infinite in another way than the exact values are.
    """
    return max((_relative_error(*pair) for pair in zip(outputs, exact)), default=0.0)


def _relative_error(output: Tensor, truth: Tensor) -> float:
    scale = torch.linalg.vector_norm(truth)
    if not scale.isfinite():
        finite = truth.isfinite()
        if not torch.isclose(output[~finite].double(), truth[~finite], equal_nan=True).all():
            return math.inf
        output, truth = output[finite], truth[finite]
        scale = torch.linalg.vector_norm(truth)
    error = torch.linalg.vector_norm(truth - output)
    relative = float(error / scale) if scale > 0 else float(error) / math.sqrt(max(1, truth.numel()))
    return math.inf if math.isnan(relative) else relative
