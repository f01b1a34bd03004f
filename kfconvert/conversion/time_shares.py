"""The share of each module in the time of the original's forward, and the share of the fused sites."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from torch import fx, nn

from ..capture import Capture
from ..graph import is_weight
from ..runtime import originals
from .captures import Captures
from .preparation import Prepared

SECONDS = 0.5  # for the forwards, and again for the graphs; at least LEAST_ROUNDS run
LEAST_ROUNDS, MOST_ROUNDS = 3, 50


def shares_of_time(prepared: Prepared, captures: Captures) -> dict[str, Any]:
    """Returns, for the example call: ``milliseconds`` of a forward of the original, and the shares (0 to 1) of each of
    the ``modules`` with its calls, by path. ``fused`` is the share of the operators in applied sites.

    Hooks time the modules. Operators are timed in the captured graphs, each launched from Python as in the original.
    """
    model, call = prepared.model, prepared.call.copied()
    clock = _Clock(prepared.device)

    def forward() -> dict[str, float]:
        with _timed_modules(model, clock) as spans:
            call(model)
        return clock.totals(spans)

    with torch.no_grad(), originals():
        seconds = _medians(forward)
        total = max(seconds[""], 1e-9)
        shares = {path: took / total for path, took in seconds.items()}
        fused = sum(
            shares.get(captured.path, 0.0) * _share_of_sites(captured, clock)
            for captured in captures.outermost()
            if captured.applied
        )
    modules = {path: round(share, 4) for path, share in shares.items()}
    return {"milliseconds": 1e3 * total, "fused": round(fused, 4), "modules": modules}


class _Clock:
    """Time stamps on the host or, on CUDA, in the current stream."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def totals(self, spans: list[tuple[Any, Any, Any]]) -> dict[Any, float]:
        """Returns the seconds of each key of ``spans`` (key, begin, end)."""
        if self._is_cuda:
            torch.cuda.synchronize()
        found: dict[Any, float] = defaultdict(float)
        for key, begin, end in spans:
            found[key] += begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin
        return found


def _medians(run: Callable[[], dict[Any, float]]) -> dict[Any, float]:
    """Returns the median seconds of each key, of several runs after a warm-up run."""
    run()
    rounds: list[dict[Any, float]] = []
    end = time.perf_counter() + SECONDS
    while len(rounds) < LEAST_ROUNDS or (time.perf_counter() < end and len(rounds) < MOST_ROUNDS):
        rounds.append(run())
    return {key: median(found.get(key, 0.0) for found in rounds) for key in rounds[0]}


@contextmanager
def _timed_modules(model: nn.Module, clock: _Clock) -> Iterator[list[tuple[Any, Any, Any]]]:
    """Context manager that times calls of the modules of ``model``: the list gets (path, begin, end) of each call."""
    spans: list[tuple[Any, Any, Any]] = []
    begun: list[Any] = []

    def before(module: nn.Module, args: Any) -> None:
        begun.append(clock.now())

    def after(path: str) -> Callable[..., None]:
        return lambda module, args, output: spans.append((path, begun.pop(), clock.now()))

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):
                stack.callback(module.register_forward_pre_hook(before).remove)
                stack.callback(module.register_forward_hook(after(path)).remove)
        yield spans


class _Timed(fx.Interpreter):
    """Runs the graph of a region; ``spans`` gets (whether a call is in an applied site, begin, end)."""

    def __init__(self, captured: Capture, clock: _Clock):
        super().__init__(captured.region.root, graph=captured.region.graph)
        self._clock = clock
        self._covered = {node for site in captured.applied for node in site.match.nodes}
        self.spans: list[tuple[Any, Any, Any]] = []

    def run_node(self, n: fx.Node) -> Any:
        self._is_covered = n in self._covered
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        begin = self._clock.now()
        result = super().call_function(target, args, kwargs)
        self.spans.append((self._is_covered, begin, self._clock.now()))
        return result


def _share_of_sites(captured: Capture, clock: _Clock) -> float:
    """Returns the share of the operators in applied sites of ``captured`` in the time of all its operators."""

    def run() -> dict[bool, float]:
        timed, users = _Timed(captured, clock), iter(captured.leaves)
        nodes = [node for node in captured.region.graph.nodes if node.op == "placeholder"]
        timed.run(*(captured.live.tensor(node) if is_weight(node) else next(users) for node in nodes))
        return {True: 0.0, False: 0.0} | clock.totals(timed.spans)

    seconds = _medians(run)
    return seconds[True] / max(seconds[True] + seconds[False], 1e-9)
