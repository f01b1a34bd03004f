"""The engine that runs each conversion in a Ray task, on this machine or in a cluster.

Functions import Ray when they need it, because it is an optional dependency.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

from .workers import SECONDS_TO_END, Lost


@contextlib.contextmanager
def ray_tasks(at_once: int, threads: int, on_gpus: bool) -> Iterator[RayTasks]:
    """Context manager that yields the engine, in a new Ray instance on this machine or in the cluster of RAY_ADDRESS.

    Args:
        at_once: maximum number of parallel tasks.
        threads: maximum number of CPUs of a task.
        on_gpus: whether each task needs a GPU, and waits until one is free.

    Raises:
        click.ClickException: Ray does not start, or it has no GPUs and ``on_gpus`` is set.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    import ray

    from ..conversion import first_line

    try:
        # The output of tasks is returned with their results, so Ray does not log it.
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise click.ClickException(f"Ray does not start: {first_line(error)}") from error
    # A thread of Ray prints the state of its processes on stdout, and no option disables that.
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
    """An engine that runs each task as a Ray task, in a new process.

    Args:
        threads: CPUs per task.
        gpus: GPUs per task, which are the only ones that it sees.
    """

    def __init__(self, threads: int, gpus: int):
        import ray

        self.threads = threads
        # No retries: the next process would fail as well. A process is not reused, so that its GPU becomes free.
        self._remote = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0, max_calls=1)(_serve)

    def start(self, work: Callable[[Any, int], Any], task: Any, slot: int) -> Any:
        return self._remote.remote(work, task, slot)

    def ended(self, running: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        import ray

        from ..conversion import first_line

        for each in ray.wait(list(running))[0]:
            try:
                printed, result = ray.get(each)
            except ray.exceptions.RayError as error:
                yield each, Lost(f"its task in Ray failed: {first_line(error)}")
            else:
                click.echo(printed, nl=False, err=True)
                yield each, result

    def end(self, running: Sequence[Any]) -> None:
        """Interrupts each task. The end of Ray kills those that do not end in time."""
        import ray

        for each in running:
            ray.cancel(each)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=SECONDS_TO_END)


def _serve(work: Callable[[Any, int], Any], task: Any, slot: int) -> tuple[str, Any]:
    """Runs a task and returns (printed output, result)."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(printed):
        result = work(task, slot)
    return printed.getvalue(), result
