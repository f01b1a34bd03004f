"""Parallel tasks: the loop over them, and the engine that runs each task in a separate process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing import connection, resource_tracker
from typing import Any, NamedTuple, Protocol

# Seconds that an interrupted process has for its clean-up.
SECONDS_TO_END = 10.0


class Lost(NamedTuple):
    """The outcome of a task that ended without a result, with the ``reason`` as text."""

    reason: str


class Engine(Protocol):
    """An engine runs tasks in isolation from each other."""

    def start(self, work: Callable[[Any, int], Any], task: Any, slot: int) -> Any:
        """Starts ``work(task, slot)`` and returns a hashable handle."""

    def ended(self, running: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
        """Waits until at least one of ``running`` (not empty) has ended. Yields each ended handle with its result or
        ``Lost``."""

    def end(self, running: Sequence[Any]) -> None:
        """Ends all of ``running``, with SECONDS_TO_END for their clean-up."""


def run_tasks(
    engine: Engine,
    work: Callable[[Any, int], Any],
    tasks: Sequence[Any],
    at_once: int,
    done: Callable[[Any, Any], None],
) -> None:
    """Calls ``done(task, result)`` when a task ends, with the result of ``work(task, slot)`` or ``Lost``. ``work``,
    tasks and results are pickled.

    Args:
        at_once: number of parallel tasks. ``slot`` is below it, and parallel tasks have different slots.

    Any exception in here, such as Ctrl-C, ends all running tasks.
    """
    waiting, free = list(reversed(tasks)), list(reversed(range(at_once)))
    running: dict[Any, tuple[Any, int]] = {}
    try:
        while waiting or running:
            while waiting and free:
                task, slot = waiting.pop(), free.pop()
                running[engine.start(work, task, slot)] = task, slot
            for each, result in engine.ended(list(running)):
                task, slot = running.pop(each)
                free.append(slot)
                done(task, result)
    finally:
        engine.end(list(running))


class _Running(NamedTuple):
    process: Any
    results: connection.Connection


class Processes:
    """An engine that runs each task in a separate process. Tasks interrupt themselves if this process is killed."""

    def start(self, work: Callable[[Any, int], Any], task: Any, slot: int) -> _Running:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_serve, args=(theirs, work, task, slot))
        with theirs, _uninterrupted():
            process.start()
        return _Running(process, ours)

    def ended(self, running: Sequence[_Running]) -> Iterator[tuple[_Running, Any]]:
        connection.wait([place for each in running for place in (each.results, each.process.sentinel)])
        for each in running:
            if each.results.poll() or not each.process.is_alive():
                yield each, _result(each)

    def end(self, running: Sequence[_Running]) -> None:
        """Interrupts each process, and kills it if it does not end in time."""
        _end([each.process for each in running])


def _result(each: _Running) -> Any:
    """Receives the result of a process after it has ended and its memory is free."""
    found: Any = None
    with each.results, contextlib.suppress(EOFError, OSError, pickle.UnpicklingError):
        if each.results.poll():
            found = (each.results.recv(),)
    each.process.join(SECONDS_TO_END)
    if each.process.is_alive():
        each.process.kill()
        each.process.join()
    return found[0] if found else Lost(_how_it_ended(each.process.exitcode))


def _how_it_ended(exit_code: int | None) -> str:
    """Describes the ``exit_code`` of a process; a negative one is the signal that ended it."""
    if exit_code == -signal.SIGKILL:
        return "its process was killed, possibly because memory ran out"
    if exit_code is not None and exit_code < 0:
        return f"its process was ended by {signal.Signals(-exit_code).name}"
    return f"its process ended with the exit code {exit_code}"


def _end(processes: Iterable[Any]) -> None:
    deadline = time.monotonic() + SECONDS_TO_END
    try:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGINT)
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:  # at a second Ctrl-C as well
        for process in processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Context manager that blocks SIGINT in processes started within it. A Ctrl-C, which the terminal sends to all
    processes, waits until ``_serve`` handles it."""
    resource_tracker.ensure_running()  # its start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(results: connection.Connection, work: Callable[[Any, int], Any], task: Any, slot: int) -> None:
    """Runs a task in its process and sends the result."""

    def interrupt(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal and the parent may both send it
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, interrupt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        threading.Thread(target=_end_with_parent, daemon=True).start()
        results.send(work(task, slot))
    except KeyboardInterrupt:  # reported by the parent
        sys.exit(128 + signal.SIGINT)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(SECONDS_TO_END)
    os._exit(1)
