"""The engine that gives each thing to do a task of Ray, on this machine or on those of a cluster.

Ray is imported within the functions: it is an extra, which the rest of the command does without.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from .workers import SECONDS_TO_END, Lost


@contextlib.contextmanager
def ray_tasks(at_once: int, threads: int, on_gpus: bool) -> Iterator[RayTasks]:
    """Yields the engine, in a Ray of its own on this machine, or in the cluster that RAY_ADDRESS names.

    Args:
        at_once: so many tasks run at a time, as far as there is room for them.
        threads: the most CPUs that a task may have, of those that fall to it.
        on_gpus: each task has a GPU, and waits until one is free.

    Raises:
        click.ClickException: Ray does not start, or has no GPUs where they are needed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a conversion tells nobody of itself
    import ray

    from ..conversion import first_line

    try:
        # What tasks print comes with their results; from Ray's log it would come at any time, each line with a prefix.
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise click.ClickException(f"Ray does not start: {first_line(error)}") from error
    # A thread of Ray prints on stdout, at any time, what has become of its processes; no option keeps it from that.
    ray._private.worker._worker_logs_enabled = False
    try:
        there = ray.cluster_resources()
        if on_gpus and not there.get("GPU"):
            raise click.ClickException("Ray has no GPUs: --device cpu, or --engine process")
        yield RayTasks(max(1, min(threads, int(there.get("CPU", 1)) // at_once)), int(on_gpus))
    finally:
        ray.shutdown()
        ray._private.worker._worker_logs_enabled = True


class RayTasks:
    """An engine: each task is one of Ray, in a process that nothing else has used.

    Args:
        threads: CPUs of each task.
        gpus: GPUs of each task, which sees no others.
    """

    def __init__(self, threads: int, gpus: int):
        import ray

        self.threads = threads
        # Whatever kills a process would kill the next one as well, and a GPU is to be free when its task has ended.
        self._remote = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0, max_calls=1)(_serve)

    def start(self, work: Callable[[Any, int], Any], task: Any, slot: int) -> Any:
        return self._remote.remote(work, task, slot)

    def ended(self, running: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        import ray

        for each in ray.wait(list(running))[0]:
            try:
                printed, result = ray.get(each)
            except ray.exceptions.RayError as error:
                yield each, Lost(_how_it_ended(error))
            else:
                click.echo(printed, nl=False, err=True)
                yield each, result

    def end(self, running: Sequence[Any]) -> None:
        """Each task is interrupted, and its process killed where it takes longer."""
        import ray

        deadline = time.monotonic() + SECONDS_TO_END
        try:
            for each in running:
                ray.cancel(each)
            if running:
                ray.wait(list(running), num_returns=len(running), timeout=max(0.0, deadline - time.monotonic()))
        finally:  # at a second Ctrl-C as well
            for each in running:
                ray.cancel(each, force=True)


def _serve(work: Callable[[Any, int], Any], task: Any, slot: int) -> tuple[str, Any]:
    """What a task does: (what it has printed, result)."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(printed):
        result = work(task, slot)
    return printed.getvalue(), result


def _how_it_ended(error: Exception) -> str:
    import ray

    from ..conversion import first_line

    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "Ray has killed its process, as memory ran out"
    if isinstance(error, ray.exceptions.WorkerCrashedError):
        return "its process died, as where memory runs out"
    return f"its task in Ray failed: {first_line(error)}"
