"""The share of each module in the time of the original's forward, and the share of the fused sites."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import fx

from ..capture import Capture, Clock, timed_modules
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
    clock = Clock(prepared.device.type)

    def forward() -> dict[str, float]:
        with timed_modules(model, clock) as spans:
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


def _medians(run: Callable[[], dict[Any, float]]) -> dict[Any, float]:
    """Returns the median seconds of each key, of several runs after a warm-up run."""
    run()
    rounds: list[dict[Any, float]] = []
    end = time.perf_counter() + SECONDS
    while len(rounds) < LEAST_ROUNDS or (time.perf_counter() < end and len(rounds) < MOST_ROUNDS):
        rounds.append(run())
    return {key: median(found.get(key, 0.0) for found in rounds) for key in rounds[0]}


class _Timed(fx.Interpreter):
    """Runs the graph of a region; ``spans`` gets (whether a call is in an applied site, begin, end)."""

    def __init__(self, captured: Capture, clock: Clock):
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


def _share_of_sites(captured: Capture, clock: Clock) -> float:
    """Returns the share of the operators in applied sites of ``captured`` in the time of all its operators."""

    def run() -> dict[bool, float]:
        timed = _Timed(captured, clock)
        timed.run(*captured.live.arguments(captured.leaves))
        return {True: 0.0, False: 0.0} | clock.totals(timed.spans)

    seconds = _medians(run)
    return seconds[True] / max(seconds[True] + seconds[False], 1e-9)
